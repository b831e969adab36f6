"""Optimizers: asynchronous, synchronous and in between."""
