"""The repository's own promises: what the lock file holds, what is installed, and no trace of anybody's machine."""

import pathlib
import re
import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.tools import house

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Home directories and the like, but not a part of a longer path or of a device name.
MACHINE_PATH = re.compile(r"(?<![\w.:*)}>-])/(?:root|work|home|Users)/\w")


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


_TRAINING = ("digits", "mnist", "tensorboard")
APART = {
    "requirements-ray.lock": ("ray", "test"),
    "requirements-cuda12.lock": ("cuda12", *_TRAINING),
    "requirements-cuda13.lock": ("cuda13", *_TRAINING),
}
"""Extras that are large, or need older packages than others, have environments of their own."""
LOCKS = (
    "requirements.lock",
    "requirements-dev.lock",
    "requirements-lowest.lock",
    "requirements-newest.lock",
    *APART,
)
PIN = re.compile(
    r"([a-z0-9]+(?:-[a-z0-9]+)*)(?:\[[a-z,]+\])?==([0-9][\w.+!]*)((?: --hash=sha256:[0-9a-f]{64})*)"
)


def _locked(lock: str) -> list[str]:
    return re.sub(r" \\\n +", " ", (ROOT / lock).read_text()).splitlines()


def _pins(lock: str) -> dict[str, str]:
    return {pin[1]: pin[2] for line in _locked(lock) if (pin := PIN.fullmatch(line))}


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_is_sorted_pins(lock: str) -> None:
    """A lock file holds sorted pins with hashes."""
    pins = [PIN.fullmatch(line) for line in _locked(lock)]
    names = [pin[1] for pin in pins if pin]
    assert len(names) == len(pins)
    assert names == sorted(set(names))
    assert [pin[1] for pin in pins if pin and not pin[3]] == [], "without hashes"


def test_training_pins_are_tested_pins() -> None:
    """The packages that train have the versions that are tested."""
    assert _pins("requirements.lock").items() <= _pins("requirements-dev.lock").items()


def test_lock_holds_every_dependency() -> None:
    """The lock files hold every dependency of the project."""
    project = _project()
    extras = dict(project["optional-dependencies"])
    # large, and in no test: tests/docs/notebooks.py runs the cells
    assert extras.pop("notebooks") == ["jupyterlab>=4"]
    for lock, names in APART.items():
        apart = [*project["dependencies"], *(text for name in names for text in extras[name])]
        assert {_canonical(Requirement(text).name) for text in apart} <= _pins(lock).keys()
    for names in APART.values():
        del extras[names[0]]
    wanted = project["dependencies"] + [name for extra in extras.values() for name in extra]
    assert {_canonical(Requirement(text).name) for text in wanted} <= _pins(
        "requirements-dev.lock"
    ).keys()
    wanted = [
        *project["dependencies"],
        *(name for e in _TRAINING for name in project["optional-dependencies"][e]),
    ]
    assert {_canonical(Requirement(text).name) for text in wanted} <= _pins(
        "requirements.lock"
    ).keys()


@pytest.mark.parametrize("cuda", ["cuda12", "cuda13"])
def test_cuda_lock_fits_tested_jax(cuda: str) -> None:
    """A lock with CUDA has the packages of the lock without, and CUDA's plugin of the same JAX."""
    plain, pins = _pins("requirements.lock"), _pins(f"requirements-{cuda}.lock")
    assert _project()["optional-dependencies"][cuda] == [f"jax[{cuda}]"]
    assert plain.items() <= pins.items()
    assert pins[f"jax-{cuda}-plugin"] == pins[f"jax-{cuda}-pjrt"] == plain["jax"]
    for other in {*LOCKS} - {f"requirements-{cuda}.lock"}:
        assert f"jax-{cuda}-plugin" not in _pins(other), other


def test_dependency_floors_are_tested() -> None:
    """The lowest version of each dependency is tested."""
    pins = _pins("requirements-lowest.lock")
    project = _project()
    for text in (
        *project["dependencies"],
        *project["optional-dependencies"]["digits"],
        *project["optional-dependencies"]["mnist"],
    ):
        wanted = Requirement(text)
        (floor,) = [limit.version for limit in wanted.specifier if limit.operator == ">="]
        assert Version(pins[_canonical(wanted.name)]) == Version(floor), (
            f"{text}: requirements-lowest.lock has another"
        )


def test_jax_bound_is_tested() -> None:
    """The highest version of JAX is the newest that was tested."""
    (bound,) = [r for text in _project()["dependencies"] if (r := Requirement(text)).name == "jax"]
    newest = Version(_pins("requirements-newest.lock")["jax"])
    assert newest in bound.specifier
    assert Version(f"0.{newest.minor + 1}") not in bound.specifier


def test_lock_files_hold_no_addresses() -> None:
    """Lock and project files hold no addresses."""
    for name in (*LOCKS, "pyproject.toml", "Makefile", ".ci/run"):
        assert "://" not in (ROOT / name).read_text(), name


def test_only_two_packages_are_installed() -> None:
    """Only harness and runtime are installed as packages."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"][
        "find"
    ]["include"]
    assert found == ["harness", "harness.*", "runtime", "runtime.*"]


@pytest.mark.cluster
def test_files_hold_no_machine_paths() -> None:
    """No file holds a path of a developer's machine."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True)
    found = []
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if not path.is_file():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [
            f"{name}:{n}"
            for n, line in enumerate(text.splitlines(), 1)
            if MACHINE_PATH.search(line)
        ]
    assert found == []
    assert MACHINE_PATH.search('"/' + 'home/someone/data"')


def test_retired_words_name_no_code() -> None:
    """No retired word names a module or a class."""
    assert house.retired() == []


def test_public_class_names_are_unique() -> None:
    """No two public classes have one name."""
    assert house.doubles() == {}


def test_house_finds_wrong_names(tmp_path: pathlib.Path) -> None:
    """The check finds a retired word and a second class of one name."""
    for name, text in {
        "runtime/state/store.py": "class Store: ...\n",
        "runtime/task/mirrors.py": "class Store: ...\n\n\nclass Mirror: ...\n\n\nclass _Cut: ...\n",
        "harness/tf1/store.py": "class Store: ...\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert house.retired(tmp_path) == ["runtime.task.mirrors", "runtime.task.mirrors.Mirror"]
    assert house.doubles(tmp_path) == {"Store": ["runtime.state.store", "runtime.task.mirrors"]}


def test_tests_lie_in_their_rooms() -> None:
    """The tests of a room lie in a folder with the room's name."""
    for package in house.LAYERS:
        tests = {path.parent.name for path in house.folder(f"tests.{package}").glob("*/test_*.py")}
        rooms = {path.name for path in house.folder(package).iterdir() if path.is_dir()}
        assert tests <= rooms


def test_any_is_rare() -> None:
    """Any stays below its limit."""
    assert house.anys() <= 900
