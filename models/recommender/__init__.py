"""Films for people who like films, learned on parameter servers with tables."""
