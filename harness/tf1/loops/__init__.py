"""Conditionals and loops, each of which is one operation."""
