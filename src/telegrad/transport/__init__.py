"""Messages between two peers: in one process, on one host, between hosts."""
