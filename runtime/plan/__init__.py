"""The planner: prune, place, partition into stages, lower.

Pure functions of the graph, testable without a server.
"""
