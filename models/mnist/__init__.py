"""Handwritten digits, an example to read top to bottom: `data` is learned from, `model` learns, `trainer` runs it."""
