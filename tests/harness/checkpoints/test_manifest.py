"""The manifest is the same text from version to version: those who come later must read what is there."""

import json
import zlib
from typing import Any

import numpy as np
import pytest

import runtime as rt
from harness.checkpoints import names
from harness.checkpoints.manifest import CheckpointManifest, StoredArray
from runtime.graph.op_kinds import VariableSpec
from runtime.plan.place import Device

TEXT = {
    "crc32": 3473369301,
    "manifest": {
        "cut": 42,
        "epoch": 2,
        "files": [["default/d/x", 5, 6]],
        "format": 1,
        "saved_at": 1.5,
        "sequence": 3,
        "states": {"/job:worker/task:0": {"data": 1}},
        "step": 7,
        "variables": {
            "s": {
                "dtype": "string",
                "encoded": 19,
                "shape": [2],
                "slices": [["/job:ps/task:0", [0], [2]]],
            },
            "w": {
                "dtype": "float32",
                "encoded": 0,
                "shape": [4, 2],
                "slices": [["/job:ps/task:1", [0, 0], [1, 2]], ["/job:ps/task:0", [1, 0], [3, 2]]],
            },
        },
    },
}


def slices() -> list[rt.lowlevel.VariableSlice]:
    """``w`` in two parts on two tasks, and strings."""
    found = []
    for task, rows, first in ((1, 1, 0), (0, 3, 1)):
        part = VariableSpec(f"w/{first}", (rows, 2), np.dtype(np.float32))
        place = rt.lowlevel.ArraySlice("w", part.shape, part.dtype, (4, 2), (first, 0), (1, 2))
        found.append(rt.lowlevel.VariableSlice(part, Device("ps", task), place))
    strings = VariableSpec("s", (2,), np.dtype(object), "container")
    place = rt.lowlevel.ArraySlice.whole("s", strings.shape, strings.dtype)
    return [*found, rt.lowlevel.VariableSlice(strings, Device("ps", 0), place, encoded=19)]


def test_manifest_text_is_stable() -> None:
    """The text of a manifest is the same as that of earlier versions."""
    file = rt.lowlevel.CheckpointFile("default/d/x", 5, 6)
    states = {"/job:worker/task:0": {"data": 1}}
    manifest = CheckpointManifest(7, 3, 2, 1.5, names.described(slices()), [file], states, 42)
    text = json.loads(manifest.to_json())
    assert text == TEXT
    assert CheckpointManifest.from_json(json.dumps(text), "here") == manifest


def test_with_nan_names_variables_only() -> None:
    """with_nan holds names of variables only, whatever the file says."""
    written = CheckpointManifest(7, 3, 2, 1.5, names.described(slices()), with_nan=["s", "w"])
    assert CheckpointManifest.from_json(written.to_json(), "here").with_nan == ("s", "w")
    body = json.loads(written.to_json())["manifest"] | {"with_nan": ["\x1b[2J", "w", 3]}
    crc = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    assert CheckpointManifest.from_json(
        json.dumps({"crc32": crc, "manifest": body}), "here"
    ).with_nan == ("w",)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        ({"files": [["a\x1b[2J", 5, 6]]}, r"the name 'a\\x1b\[2J'"),
        ({"files": [["a", None, 6]]}, "a number of it is none"),
        ({"saved_at": float("inf")}, "the time inf"),
        ({"saved_at": float("nan")}, "the time nan"),
        ({"saved_at": 1e300}, "the time 1e.300"),
        ({"saved_at": None}, "manifest cannot be read"),
        ({"step": "7"}, "a number of it is none"),
        (
            {"variables": {"w\n": {"dtype": "float32", "encoded": 0, "shape": [], "slices": []}}},
            r"the name 'w\\n'",
        ),
        (
            {"variables": {"w": {"dtype": "float32", "encoded": 0, "shape": [None], "slices": []}}},
            "a number of it",
        ),
        (
            {"variables": {"w": {"dtype": "float32", "encoded": 0, "shape": None, "slices": []}}},
            "cannot be read",
        ),
        ({"variables": {"w": {"dtype": 3, "encoded": 0, "shape": [], "slices": []}}}, "the name 3"),
    ],
)
def test_impossible_manifest_is_damaged(harm: dict[str, Any], why: str) -> None:
    """A manifest with impossible fields is damaged, and the error is printable."""
    body = TEXT["manifest"] | harm  # type: ignore[operator]
    crc = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    with pytest.raises(rt.DataLossError, match=f"^there is damaged: its .*{why}") as caught:
        CheckpointManifest.from_json(json.dumps({"crc32": crc, "manifest": body}), "there")
    assert caught.value.message.isprintable()


def test_array_knows_its_stored_form() -> None:
    """An array knows its shape, dtype and bytes on disk."""
    strings = StoredArray("s", "s", "string", (2,), 19)
    assert (strings.stored.shape, strings.stored.dtype.name, strings.nbytes) == ((19,), "uint8", 19)
    numbers = StoredArray("w", "w", "bfloat16", (4, 2))
    assert (numbers.stored.full_shape, numbers.stored.dtype.name, numbers.nbytes) == (
        (4, 2),
        "bfloat16",
        16,
    )


def test_slice_survives_a_message() -> None:
    """A slice comes through a message as it was."""
    for s in slices():
        came = type(s).from_proto(s.to_proto())
        assert (came.slot, came.spec, came.array, came.stored) == (
            s.slot,
            s.spec,
            s.array,
            s.stored,
        )
        assert (came.device.type, came.device.index) == (s.device.type, s.device.index)
