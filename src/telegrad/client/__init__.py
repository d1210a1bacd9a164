"""The caller's side of a call: peers, the connections to them, and pending calls.

Modules here import neither the server's side nor the runtime; they state what they need of the
runtime in protocols.
"""
