"""The repository's own promises: what the lock file holds, what is installed, and no trace of anybody's machine."""

import pathlib
import re
import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Home directories and the like, but not a part of a longer path or of a device name.
MACHINE_PATH = re.compile(r"(?<![\w.:*)}>-])/(?:root|work|home|Users)/\w")


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


LOCKS = ("requirements.lock", "requirements-lowest.lock")


def _locked(lock: str) -> list[str]:
    return (ROOT / lock).read_text().splitlines()


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_is_plain_sorted_pins(lock: str) -> None:
    lines = _locked(lock)
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*==[0-9][\w.+!]*", line)] == []
    names = [line.partition("==")[0] for line in lines]
    assert names == sorted(set(names))


def test_lock_holds_every_dependency() -> None:
    project = _project()
    wanted = project["dependencies"] + [name for extra in project["optional-dependencies"].values() for name in extra]
    names = {line.partition("==")[0] for line in _locked("requirements.lock")}
    assert {_canonical(re.split(r"[\s\[<>=!~;]", requirement)[0]) for requirement in wanted} <= names


def test_every_dependency_has_a_floor_that_is_tried() -> None:
    pins = dict(line.split("==") for line in _locked("requirements-lowest.lock"))
    project = _project()
    for text in (
        *project["dependencies"],
        *project["optional-dependencies"]["digits"],
        *project["optional-dependencies"]["mnist"],
    ):
        wanted = Requirement(text)
        (floor,) = [limit.version for limit in wanted.specifier if limit.operator == ">="]
        assert Version(pins[_canonical(wanted.name)]) == Version(floor), f"{text}: requirements-lowest.lock has another"


def test_no_addresses_in_lock_and_project() -> None:
    for name in (*LOCKS, "pyproject.toml", "Makefile", ".ci/run"):
        assert "://" not in (ROOT / name).read_text(), name


def test_only_the_two_packages_are_installed() -> None:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert found == ["harness", "harness.*", "runtime", "runtime.*"]


@pytest.mark.cluster
def test_no_paths_of_anybodys_machine() -> None:
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
        found += [f"{name}:{n}" for n, line in enumerate(text.splitlines(), 1) if MACHINE_PATH.search(line)]
    assert found == []
    assert MACHINE_PATH.search('"/' + 'home/someone/data"')
