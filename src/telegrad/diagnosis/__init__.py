"""What a worker tells about itself: its calls, latencies, stacks, memory and recent past.

`snapshot` returns all of it as values of JSON. `service` answers observers (`telegrad.observer`),
which connect like a worker but are not members of the group. Nothing here runs code of the user,
uses the executor, or waits for a lock that is held while code of the user runs.
"""
