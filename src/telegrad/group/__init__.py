"""The group of workers: membership, collectives, the shared secret, maintenance and shutdown."""
