"""For tests: `LocalCluster`, several workers in one process, and `faults`, planned failures."""

from telegrad.testing.cluster import LocalCluster

__all__ = ["LocalCluster"]
