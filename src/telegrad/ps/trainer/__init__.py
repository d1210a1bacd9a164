"""The trainer's side of parameter servers: the optimizer, flat parameters and clients of shards."""
