"""Start: a session that is opened and made ready, and that takes the place of one that was lost."""
