"""Stop: the end of a run, which keeps the last step and leaves no task behind."""
