"""Both packages under one name, that of the distribution: ``import bellwether as bw``.

It is installed as the module ``bellwether``. ``bw.Supervisor`` is ``harness.Supervisor``,
``bw.Variable`` is ``runtime.Variable``; the two packages have no name in common.
"""

import importlib

_PACKAGES = ("harness", "runtime")  # harness first: it sees whether the runtime is ours


def __getattr__(name: str) -> object:
    for package in map(importlib.import_module, _PACKAGES):
        if name in package.__all__ or name in ("__version__", package.__name__):
            return package if name == package.__name__ else getattr(package, name)
    raise AttributeError(f"neither harness nor runtime has the name {name!r}")


def __dir__() -> list[str]:
    return sorted(
        {name for package in map(importlib.import_module, _PACKAGES) for name in package.__all__}
    )
