"""Bytes to messages and back: no I/O, no threads, no clock."""
