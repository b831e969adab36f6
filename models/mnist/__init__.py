"""Handwritten digits, an example: `minimal` is all of it in one page, `trainer` the same with what a real run wants."""
