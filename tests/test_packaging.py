"""What is installed: the wheel's packages and commands, one name for both packages, the version."""

import email
import pathlib
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

import harness
import runtime as rt
from harness import bellwether as bw
from harness import monitoring

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_bellwether_joins_both_packages() -> None:
    """The package bellwether has the names of harness and runtime."""
    assert not set(harness.__all__) & set(rt.__all__)
    assert set(dir(bw)) == {*harness.__all__, *rt.__all__}
    assert bw.Supervisor is harness.Supervisor and bw.Variable is rt.Variable
    assert bw.harness is harness and bw.runtime is rt
    with pytest.raises(AttributeError, match="neither harness nor runtime has the name 'Trainer'"):
        _ = bw.Trainer


def test_packages_share_one_version() -> None:
    """All packages have one version."""
    assert harness.__version__ == rt.__version__ == bw.__version__ == rt.lowlevel.version()
    assert rt.__version__[0].isdigit()


@pytest.mark.cluster
def test_installed_commands_are_functions() -> None:
    """Each installed command names a function."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {
        "bellwether-certs",
        "bellwether-inspect",
        "bellwether-launch",
        "bellwether-status",
    }
    for where in scripts.values():
        module, _, function = where.partition(":")
        asked = f"import {module} as m; assert callable(m.{function})"
        subprocess.run([sys.executable, "-c", asked], cwd=ROOT, check=True)


TRAINS = """
import sys, tempfile
import harness, optax
import runtime as rt

with harness.join_cluster([]) as me, me.device():
    step = harness.get_or_create_global_step()
    loss = rt.call(lambda w: (w**2).sum(), rt.Variable([1.0, 2.0], name="w"))
    train = harness.Optimizer(optax.adam(0.1)).minimize(loss, step)
    with tempfile.TemporaryDirectory() as logdir:
        supervisor = harness.Supervisor(logdir=logdir, global_step=step)
        with supervisor.managed_session(me.target) as session:
            session.run([train, loss, step])
print(*{name.partition(".")[0] for name in sys.modules})
"""
MODULES = {
    "absl-py": "absl",
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "orbax-checkpoint": "orbax",
    "protobuf": "google",
}
"""The modules of packages that have another name."""


@pytest.mark.cluster
def test_training_imports_each_dependency() -> None:
    """Each package that is always installed is imported by a program that trains and saves."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split("[>=<]", line)[0] for line in project["dependencies"]]
    done = subprocess.run(
        [sys.executable, "-c", TRAINS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = done.stdout.split()
    # Certificates alone need cryptography, and it is no matter of taste to have them.
    assert [n for n in names if MODULES.get(n, n) not in loaded] == ["cryptography"]


def test_missing_extra_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Without prometheus-client a task serves, and one line says what to install for the figures."""
    with rt.Server.create_local_server() as server, pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "harness.monitoring.prometheus", raising=False)
        patch.setitem(sys.modules, "prometheus_client", None)
        with monitoring.watched_at(server, 0):
            assert rt.probe(server.target).task == str(server.task)
    (line,) = [r.getMessage() for r in caplog.records if "figures" in r.getMessage()]
    assert "install bellwether[prometheus]" in line


URL = "https://example.org/somebody/bellwether"


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder with the wheel and the source archive, as ``make dist`` makes them."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "docs/dist.py", f"--url={URL}", f"--out={out}"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-2000:]
    return out / "out"


@pytest.mark.cluster
def test_wheel_holds_only_our_packages(
    archives: pathlib.Path,
) -> None:
    """The wheel holds both packages, their common name and no other package."""
    with zipfile.ZipFile(next(archives.glob("*.whl"))) as wheel:
        names = wheel.namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"bellwether.py", "harness", "runtime"}
    wanted = {
        "harness/manifests/templates/pod.yaml",
        "harness/__init__.pyi",
        "harness/py.typed",
        "harness/tf1/__init__.py",
        "runtime/proto/stage_pb2.py",
    }
    assert wanted <= set(names)
    assert any(name.endswith(".dist-info/entry_points.txt") for name in names)


@pytest.mark.cluster
def test_index_page_links_to_addresses(archives: pathlib.Path) -> None:
    """The page for the package index links to addresses of the tagged version."""
    with zipfile.ZipFile(next(archives.glob("*.whl"))) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(wheel.read(name))
    version = metadata["Version"]
    assert {entry.partition(", ")[0] for entry in metadata.get_all("Project-URL", [])} >= {
        "Homepage",
        "Changelog",
    }
    extras = {"cuda12", "cuda13", "notebooks", "prometheus", "ray", "tensorboard"}
    assert extras <= set(metadata.get_all("Provides-Extra", []))
    text = metadata.get_payload()
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 15 and all(link.startswith(("https://", "#")) for link in links), links
    ours = [link.removeprefix(URL) for link in links if link.startswith(URL)]
    for kind, tag, path in (link.split("/", 3)[1:] for link in ours):
        assert tag == f"v{version}" and kind == ("raw" if path.endswith(".svg") else kind)
        found = ROOT / path.partition("#")[0]
        assert found.is_dir() if kind == "tree" else found.is_file(), path
    source = next(archives.glob("*.tar.gz"))
    with tarfile.open(source) as archive:
        assert f"bellwether-{version}/pyproject.toml" in archive.getnames()
