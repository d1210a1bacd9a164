"""The caller's side of a call: peers, connections to them, and pending calls."""
