"""The parts of `python -m harness.launch`: who runs, when, and that nothing stays behind.

`policy` decides (pure functions of state, event and time), `tasks` says what each task is started
with, `ports` picks addresses, `output` makes lines out of bytes, `guard` is the small process
around each task that ends its whole process tree, and `runner` is the event loop that connects
them. `fork_server` is a process that has imported what Python tasks import; `forks` has it fork
them.
"""
