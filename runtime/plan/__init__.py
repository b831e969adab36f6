"""The planner: prune, place, cut into stages, lower. Pure functions of the graph, testable without a server."""
