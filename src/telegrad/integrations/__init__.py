"""Plug-ins for packages that train and serve policies: TorchRL, vLLM and verl.

Each module needs its package, and importing it without the package raises an `ImportError` that
says what to install. `membership` gives a process an agent, and `progress` tells a sender which
version each worker uses.
"""
