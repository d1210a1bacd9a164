"""Telegrad measured beside its peers and beside the limits of the machine; `README.md` says how to run it."""
