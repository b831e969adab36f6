"""The garbage collector while `runtime` is imported, and after it."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.cluster

_REPORT = "import gc, json, runtime; print(json.dumps([gc.isenabled(), gc.get_freeze_count(), gc.get_stats()[2]]))"


def _collector_after(*before: str) -> tuple[bool, int, int]:
    """Returns, after the import: True if the collector is on, the number of frozen objects, and of full collections."""
    program = "; ".join([*before, _REPORT])
    printed = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    enabled, frozen, oldest = json.loads(printed)
    return enabled, frozen, oldest["collections"]


def test_import_freezes_modules() -> None:
    """No full collection runs during the import, and the modules are frozen after it."""
    enabled, frozen, collections = _collector_after()
    assert enabled
    assert frozen > 50_000
    assert collections == 0


def test_late_import_collects_first() -> None:
    """Garbage from before the import is freed, since nothing would free it after the freeze."""
    cycle = "import jax, weakref; Node = type('Node', (), {}); n = Node(); n.n = n; alive = weakref.ref(n); del n"
    enabled, frozen, _ = _collector_after(cycle, "import runtime", "assert alive() is None")
    assert enabled
    assert frozen > 50_000


def test_disabled_collector_stays_disabled() -> None:
    """A program that has turned the collector off finds it off."""
    enabled, _, _ = _collector_after("import gc", "gc.disable()")
    assert not enabled


def test_interactive_session_freezes_nothing() -> None:
    """An interactive session may drop what it has made before the import."""
    enabled, frozen, _ = _collector_after("import sys", "sys.ps1 = '>>> '")
    assert enabled
    assert frozen == 0
