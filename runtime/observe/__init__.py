"""Figures of a process and of its steps, and the audit log."""
