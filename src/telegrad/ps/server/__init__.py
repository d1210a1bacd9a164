"""The server side of parameter servers.

Here are the calls that trainers make (`service`), the shards that a worker holds (`registry`,
`shard`), the decisions about members and rounds (`coordinator` and its implementations), the calls
between servers (`leader_protocol`), and checkpoints. Shards of embedding tables derive from
`base_shard`. Code that runs on trainers belongs in `telegrad.ps.trainer`.
"""
