"""Figures of a process and of its steps."""
