"""The training harness: Supervisor and friends, over the names of ``import runtime``.

Names are imported on first use, so that the launcher starts without JAX and Orbax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness import summary, timeline
    from harness.coordinator import Coordinator
    from harness.looper import LooperThread
    from harness.optimizer import Optimizer
    from harness.writer import FileWriter, FileWriterCache

_HOMES = {
    "Coordinator": "harness.coordinator",
    "FileWriter": "harness.writer",
    "FileWriterCache": "harness.writer",
    "LooperThread": "harness.looper",
    "Optimizer": "harness.optimizer",
    "summary": "harness.summary",
    "timeline": "harness.timeline",
}
"""Public name -> the module that defines it, or that it is."""

__all__ = ["Coordinator", "FileWriter", "FileWriterCache", "LooperThread", "Optimizer", "summary", "timeline"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    module = importlib.import_module(home)
    value = module if home == f"harness.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
