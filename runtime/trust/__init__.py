"""Trust between processes: tokens, certificates, roles, and the greeting of a connection."""
