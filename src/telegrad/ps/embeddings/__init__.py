"""Embedding tables whose rows are on parameter servers.

Both sides are here: modules, `Tables` and their clients on trainers; the service, shards and the
storage of rows on servers. Membership, rounds and checkpoints are not: the clients use
`ps.trainer` and the shards use `ps.server`, as those for dense parameters do.
"""
