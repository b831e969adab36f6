"""Session: what a client does with a cluster."""
