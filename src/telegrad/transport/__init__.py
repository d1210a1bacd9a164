"""Transports: how frames travel between two agents.

`channel` defines what a transport offers. `stream` (unix and TCP sockets) and `in_process`
implement it. Large buffers between processes of one machine go through shared memory:
`shared_memory` describes how, and `segments` has the memory. `sockets` opens connections.

Transports carry frames (`wire.frames`) and know nothing about calls, agents or tensors.
"""
