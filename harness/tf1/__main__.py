"""Runs a TensorFlow 1 program unchanged: ``python -m harness.tf1 program.py args...``.

    python -m harness.tf1 mnist_replica.py --job_name=worker --task_index=0
    python -m harness.tf1 -m package.module args...
    python -m harness.tf1 --check FILES OR DIRECTORIES...

The program's ``import tensorflow`` lines find ``harness.tf1``; see docs/tf1_names.md for what is
there and what is not. ``--check`` runs nothing: it tells which names of TensorFlow's the files use
that are not there, where, and what to use instead; the exit code is 1 when there are some.
"""

from __future__ import annotations

import os
import pathlib
import runpy
import sys

from harness import exit_codes
from harness.tf1.tools import check, modules

USAGE = "usage: python -m harness.tf1 (program.py | -m module) [args...], or --check FILES..."


def main(argv: list[str]) -> None:
    """Runs the program ``argv[0]``, or the module ``argv[1]`` after ``-m``, with the rest as its arguments."""
    if argv[:1] in (["-h"], ["--help"]):
        print(f"{__doc__}\n{USAGE}")
        return
    if argv[:1] == ["--check"] and argv[1:]:
        sys.exit(check.main(argv[1:]))
    as_module = argv[:1] == ["-m"]
    if len(argv) < 1 + as_module or not as_module and argv[0].startswith("-"):
        exit_codes.leave(exit_codes.CONFIGURATION, USAGE)
    modules.install()
    for_children = str(pathlib.Path(__file__).parent / "tools" / "in_children")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [for_children, os.environ.get("PYTHONPATH")])
    )
    sys.path.append(for_children)  # what multiprocessing gives a process that it spawns
    program, *arguments = argv[as_module:]
    if as_module:
        sys.argv = [program, *arguments]
        sys.path[0] = os.getcwd()
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    if not os.path.isfile(program):
        exit_codes.leave(
            exit_codes.CONFIGURATION, f"python -m harness.tf1: there is no program {program}"
        )
    sys.argv = [program, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
