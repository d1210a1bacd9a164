"""One object that owns connections, threads and pending calls."""
