"""Stop: the end of a run, with the last save and the report to every task."""
