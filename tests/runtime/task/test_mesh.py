"""A worker that computes on a mesh of four CPU devices, in a process of its own."""

import os
import re

import pytest

from tests.kit.processes import Program

pytestmark = pytest.mark.cluster
FLAGS = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"


def run(what: str) -> str:
    """Runs a part of the program of meshes, and returns its output."""
    command = ("python", "-m", "tests.runtime.task.mesh_program", what)
    with Program(*command, cold=True, env={"XLA_FLAGS": FLAGS}) as program:
        return program.result()


@pytest.mark.parametrize(
    "how",
    [
        "asynchronous",
        "pipelined",
        "synchronous",
        "set",
        "uneven",
        "constrained",
        "mapped",
        "nnx",
        "equinox",
    ],
)
def test_mesh_trains_as_one_device(how: str) -> None:
    """A mesh trains to the values of one device: with dropout, own shardings, a mesh that the program has set,
    rows that devices cannot share equally, and models of Flax and Equinox.
    """
    run(how)


def test_bytes_do_not_grow_with_devices() -> None:
    """Host and mesh exchange the same bytes however many devices the mesh has."""
    said = run("bytes")
    found = re.findall(r"(\d) devices: (\d+) bytes in, (\d+) bytes out", said)
    assert said.count("worker 0 computes on the 4 devices of a mesh") == 1, said
    assert [devices for devices, _, _ in found] == ["1", "4"]
    assert len({(copied_in, copied_out) for _, copied_in, copied_out in found}) == 1, found
    assert min(map(int, found[0])) > 0, found


def test_wrong_meshes_are_refused() -> None:
    """A mesh that a worker cannot have is refused in one line, with the cure."""
    lines = dict(line.split(": ", 1) for line in run("refusals").splitlines() if ": " in line)
    for name, words in {
        "rows": "(of size 7) to mesh axis 'batch' (of size 4), but 4 does not evenly divide 7",
        "ps": "a mesh computes in the session's own worker only",
        "two": "make one mesh for the graph",
        "number": "take the name from rt.mesh_device",
        "foreign": "4 of the 8 devices of the mesh are not of this process",
        "kind": "a mesh of devices is needed",
    }.items():
        assert words in lines[name], lines
    assert "none" not in lines, lines
