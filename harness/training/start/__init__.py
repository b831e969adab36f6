"""Start: opening a session, making the model ready, and replacing a session after the loss of a task."""
