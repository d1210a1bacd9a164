"""Objects that live on one worker and are used from others."""

from telegrad.refs.rref import RRef, remote

__all__ = ["RRef", "remote"]
