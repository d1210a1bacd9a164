"""Values and their context between two workers: packing, device routes, scopes, functions.

Modules here know which agent and which peer a message belongs to, but nothing about connections,
threads or the runtime. They import only from the transport and the wire format.
"""
