"""Benchmarks of Telegrad, its peers and the machine; `README.md` describes how to run them."""
