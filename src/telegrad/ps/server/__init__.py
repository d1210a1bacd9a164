"""The server's side of parameter servers: shards, rounds, the leader protocol and checkpoints."""
