"""Embedding tables whose rows live on parameter servers: modules, clients, shards and row storage."""
