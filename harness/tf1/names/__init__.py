"""Names that need no graph, and what is said of those that are not there."""
