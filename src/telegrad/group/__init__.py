"""The group of workers: membership, the shared secret, collectives, lost workers and shutdown.

This package has what both sides of a call need to know about the other workers. Modules here make
calls through a protocol of the runtime; they import neither the client nor the server.
"""
