"""Measurements: each module is a program that prints what it measured."""
