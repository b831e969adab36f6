"""Data that workers share while they train."""
