"""Messages as bytes: frames, the pickle codec, tensors, exceptions, the handshake.

Nothing here does I/O, starts threads, takes locks or reads a clock. Nothing here imports from the
packages above (`transport`, `messages`, `client`, `server`, `autograd`, `cuda`, ...). Where
autograd or CUDA must take part in packing a tensor, they implement a protocol of this package and
register the implementation: see `wire/gradient_tracking.py` and `wire/tensors.py`.
"""
