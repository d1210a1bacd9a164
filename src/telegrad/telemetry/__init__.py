"""Calls and workers of Telegrad in profilers, tracers, metrics and torch's debug server.

`instruments` lets a tool follow every call at its caller and its callee. `kineto` and
`opentelemetry` do so. `prometheus` and `torch_debug` show what `telegrad.diagnosis` knows of a
worker. An agent starts those that this process uses when it opens (`tools`); the others are not
imported and cost nothing.
"""
