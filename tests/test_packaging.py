"""What is installed: the wheel's packages and commands, one name for both packages, the version."""

import pathlib
import subprocess
import sys
import tomllib
import zipfile

import pytest

import harness
import runtime as rt
from harness import bellwether as bw

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_one_name_gives_the_names_of_both_packages() -> None:
    assert not set(harness.__all__) & set(rt.__all__)
    assert set(dir(bw)) == {*harness.__all__, *rt.__all__}
    assert bw.Supervisor is harness.Supervisor and bw.Variable is rt.Variable
    assert bw.harness is harness and bw.runtime is rt
    with pytest.raises(AttributeError, match="neither harness nor runtime has the name 'Trainer'"):
        _ = bw.Trainer


def test_every_package_tells_the_version() -> None:
    assert harness.__version__ == rt.__version__ == bw.__version__ == rt.lowlevel.version()
    assert rt.__version__[0].isdigit()


@pytest.mark.cluster
def test_commands_are_functions() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {"bellwether-certs", "bellwether-inspect", "bellwether-launch", "bellwether-status"}
    for where in scripts.values():
        module, _, function = where.partition(":")
        asked = f"import {module} as m; assert callable(m.{function})"
        subprocess.run([sys.executable, "-c", asked], cwd=ROOT, check=True)


@pytest.mark.cluster
def test_the_wheel_has_both_packages_and_their_common_name_and_nothing_else(tmp_path: pathlib.Path) -> None:
    copy = tmp_path / "source"
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in files.stdout.splitlines():
        if name.startswith(("harness/", "runtime/", "models/")) or "/" not in name:
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                (copy / name).write_bytes((ROOT / name).read_bytes())
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    built = subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=copy, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-2000:]
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = wheel.namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"bellwether.py", "harness", "runtime"}
    wanted = {"harness/__init__.pyi", "harness/py.typed", "harness/tf1/__init__.py", "runtime/proto/stage_pb2.py"}
    assert wanted <= set(names)
    assert any(name.endswith(".dist-info/entry_points.txt") for name in names)
