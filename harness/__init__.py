"""The training harness: Supervisor and friends, over the names of ``import runtime``.

Names are imported on first use, so that the launcher starts without JAX and Orbax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.coordinator import Coordinator
    from harness.looper import LooperThread

_HOMES = {
    "Coordinator": "harness.coordinator",
    "LooperThread": "harness.looper",
}
"""Public name -> the module that defines it."""

__all__ = ["Coordinator", "LooperThread"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
