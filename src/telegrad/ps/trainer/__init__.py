"""The trainer's side of parameter servers: the optimizer, flat parameters, and clients of shards.

Code here runs in workers that train. It calls servers only through the functions of
`ps.server.service` and the messages of `ps.messages`; it does not use shards or coordinators.
`ServerClient` and the modules for joining also serve `ps.embeddings`.
"""
