"""The training harness: Supervisor and friends, over the two faces of ``runtime``.

The names and their modules are listed once, in ``__init__.pyi``, where type checkers read them.
They are imported on first use, so that the launcher starts without JAX and Orbax.
"""

import ast
import importlib
import importlib.util
import pathlib

from harness import tracebacks


def _read_names() -> dict[str, str]:
    """The public names, and the module that each is imported from."""
    stub = ast.parse(pathlib.Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    return {
        alias.name: str(i.module)
        for i in stub.body
        if isinstance(i, ast.ImportFrom)
        for alias in i.names
    }


def _check_runtime() -> None:
    """Another package called ``runtime`` may come first on the path: a name as general as that is in many repositories.

    Raises:
        ImportError: it does; names the file.
    """
    try:
        found = importlib.util.find_spec("runtime")
    except ValueError:  # a module that somebody has made by hand
        found = None
    file = found.origin if found is not None else None
    if file is None or not pathlib.Path(file).with_name("lowlevel.py").exists():
        where = f"is {file}" if file else "has no file" if found is not None else "is not found"
        raise ImportError(
            f"`import runtime` {where}, which is not Bellwether's runtime: rename that one, or "
            f"have {pathlib.Path(__file__).parents[1]} come before it on sys.path (PYTHONPATH)"
        )


_check_runtime()
tracebacks.shorten_uncaught()
_HOMES = _read_names()
__all__ = sorted(_HOMES)

_RETIRED = frozenset(
    "CheckpointState CollectiveReplicas FeedFnHook FinalOpsHook GlobalStepWaiterHook MlflowTracker "
    "ProfilerHook QueueRunner SingularMonitoredSession Tracker WandbTracker add_queue_runner "
    "checkpoint_exists checkpoints_iterator export_function get_checkpoint_state "
    "init_from_checkpoint join_group save_pytree start_queue_runners testing".split()
)
"""The names of earlier versions, each with a line in ``runtime.retired``."""


def __getattr__(name: str) -> object:
    if name == "__version__":
        return importlib.import_module("runtime.lowlevel").version()
    if name not in _HOMES:
        # Submodules are asked for as well: a tool that starts without JAX must not load the runtime
        # for them.
        if name in _RETIRED:
            line = importlib.import_module("runtime.lowlevel").explain_name(f"harness.{name}")
            raise ImportError(line)  # an AttributeError would lose the line in a from-import
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    value = (
        vars(home)[name]
        if name in vars(home)
        else importlib.import_module(f"{home.__name__}.{name}")
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
