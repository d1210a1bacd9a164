"""Transfer of CUDA tensors between workers.

`packing` decides how a CUDA tensor travels: inside the message, as device memory that the receiver
maps and copies (CUDA IPC), or through host memory. `send` and `receive` are the two ends of one
message, `transfers` keeps the leases of the memory that is sent, `ipc` exports and maps memory, and
`driver` calls the CUDA driver. Which device a tensor arrives on is decided in
`telegrad.messages.device_routes`. Nothing here may import the agent, its runtime, or anything above
them.
"""
