"""What a ``tests.kit.processes.Task`` runs: a function that comes through the pipe that is its standard input."""

import importlib
import os
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    """Runs the function."""
    pipe: Connection[Any, Any] = Connection(os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    module, function, arguments = pipe.recv()
    getattr(importlib.import_module(module), function)(*arguments, pipe)


if __name__ == "__main__":
    main()
