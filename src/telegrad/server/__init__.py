"""The callee's side of a call: accepted connections, running calls, replies.

Modules here import neither the caller's side nor the runtime; they state what they need of the
runtime in protocols.
"""
