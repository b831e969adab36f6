"""Trust between processes: tokens, certificates and roles."""
