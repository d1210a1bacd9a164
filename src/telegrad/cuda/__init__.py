"""Transfer of CUDA tensors between workers.

This package decides how a CUDA tensor travels: inside the message, as device memory that the
receiver maps and copies (CUDA IPC), or through host memory. `transfers` makes that decision and
keeps the leases, `send` and `receive` are the two ends of one message, `ipc` wraps the CUDA driver.
Which device a tensor arrives on is decided in `telegrad.messages.routes`. Nothing here may import
the agent, its runtime, or anything above them.
"""
