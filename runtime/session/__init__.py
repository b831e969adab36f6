"""Session: the client's side of a cluster."""
