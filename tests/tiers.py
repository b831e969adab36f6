"""The tiers of the tests: what a test needs, and so when it runs.

One without a mark is a unit test.

A mark at a test goes before that of its file.
"""

import multiprocessing.process
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

TIERS = {
    "unit": "starts no process and is quick: what has no other mark",
    "cluster": "starts processes: tasks, launchers, programs; or runs many servers or compilations in this one",
    "disk": "checkpoints and event files on a file system that is full, slow, damaged or lost, and many saves",
    "browser": "TensorBoard and its pages in a headless Chromium",
    "chaos": "the longest: many kills and cuts, random histories, long periods, whole trainings, programs of the pages",
    "gpu": "needs an NVIDIA GPU; make test-gpu",
    "nightly": "longer still, rarely broken: examples, programs of the pages, many tasks, pods, Ray; make test-nightly",
}

_ALL_IN_ANOTHER_TIER = re.compile(
    rf"^pytestmark = .*mark\.({'|'.join(TIERS.keys() - {'unit'})})\b", re.MULTILINE
)
_STARTS = {
    "subprocess.Popen",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.exec",
    "os.system",
    "multiprocessing",
}
_unit_test: str | None = None
"""The unit test that runs now."""


def tier_of(item: pytest.Item) -> str:
    """Returns the tier of a test: its own mark, or that of its class, or that of its file."""
    for node in reversed(item.listchain()):
        if tiers := sorted({mark.name for mark in node.own_markers if mark.name in TIERS}):
            if len(tiers) > 1:
                raise pytest.UsageError(
                    f"{node.nodeid} has the tiers {' and '.join(tiers)}: a test has one"
                )
            return tiers[0]
    return "unit"


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marks, and watches the starts of processes from now on."""
    for name, meaning in TIERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    sys.addaudithook(_refuse_processes)
    multiprocessing.process.BaseProcess.start = _start_of_a_process  # type: ignore[method-assign]


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Spares `-m unit` the import of files without a unit test, a third of the time before the first test."""
    if config.option.markexpr == "unit" and collection_path.suffix == ".py":
        text = collection_path.read_text()
        return True if _ALL_IN_ANOTHER_TIER.search(text) and "mark.unit" not in text else None
    return None


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves every test with the mark of its one tier."""
    tiers = {item: tier_of(item) for item in items}
    for node in {node for item in items for node in item.listchain()}:
        node.own_markers = [mark for mark in node.own_markers if mark.name not in TIERS]
    for item, tier in tiers.items():
        item.add_marker(tier)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Keeps the name of the unit test that runs, its fixtures included."""
    global _unit_test
    _unit_test = item.nodeid if tier_of(item) == "unit" else None
    try:
        return (yield)
    finally:
        _unit_test = None


def _refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    if _unit_test is not None and event in _STARTS:
        what = str(arguments[0])[:100] if arguments else ""
        # older numpy.testing looks at the processor when it is imported
        if what.rpartition("/")[2] == "lscpu":
            return
        pytest.fail(
            f"{_unit_test} is a unit test and starts a process ({event} {what}): mark it with "
            "another tier, as in "
            "`pytestmark = pytest.mark.cluster`",
            pytrace=False,
        )


_start = multiprocessing.process.BaseProcess.start


def _start_of_a_process(process: multiprocessing.process.BaseProcess) -> None:
    """Reports starts from a fork server, for which Python has no audit event."""
    sys.audit("multiprocessing", process.name)
    _start(process)
