"""Conditionals and loops, each a single operation."""
