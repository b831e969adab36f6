"""Generates the protocol modules: `python protos/generate.py [DIRECTORY]`, by default into the checkout."""

import pathlib
import subprocess
import sys
import sysconfig

ROOT = pathlib.Path(__file__).resolve().parent.parent


def generate(out: pathlib.Path) -> None:
    """Writes the *_pb2.py, *_pb2_grpc.py and .pyi files of runtime and harness under `out`, from protos/.

    Raises:
        subprocess.CalledProcessError: if the compiler finds a mistake; it prints where.
    """
    sources = sorted(
        path.relative_to(ROOT / "protos") for path in (ROOT / "protos").rglob("*.proto")
    )
    with_services = [
        path for path in sources if "\nservice " in (ROOT / "protos" / path).read_text()
    ]
    _compile([f"--{kind}_out={out}" for kind in ("python", "mypy")], sources)
    if with_services:
        _compile([f"--{kind}_out={out}" for kind in ("grpc_python", "mypy_grpc")], with_services)


def _compile(outputs: list[str], sources: list[pathlib.Path]) -> None:
    plugins = [
        f"--plugin=protoc-gen-{name}={sysconfig.get_path('scripts')}/protoc-gen-{name}"
        for name in ("mypy", "mypy_grpc")
    ]
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I.",
        *plugins,
        *outputs,
        *map(str, sources),
    ]
    subprocess.run(command, cwd=ROOT / "protos", check=True)


if __name__ == "__main__":
    generate(pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)
