"""CUDA tensors between workers: device routes, CUDA IPC, staging buffers and small copies."""
