"""The callee's side of a call: accepted connections, served functions and replies."""
