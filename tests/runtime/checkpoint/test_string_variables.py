"""Strings are where a string variable is, arrays fit what is said of them, and a task outlives those that do not."""

import json
import pathlib
import zlib
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

import harness
import runtime as rt
from runtime.checkpoint import storage, string_arrays
from runtime.checkpoint.array_slice import ArraySlice
from runtime.plan.place import Device
from runtime.plan.plan import HostCall, ProgramOutput, Stage, StageCall
from runtime.proto import services_pb2 as pb
from runtime.tensor_spec import TensorSpec
from runtime.wire.codec import encode_dynamic
from runtime.wire.messages import call_to_proto
from tests.runtime import kit
from tests.runtime.stranger import refused, slice_of, stranger

ORDER = pb.CheckpointOrder
INVALID, LOST = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS
VALUE = np.arange(6, dtype=np.float32)


@pytest.fixture
def server() -> Iterator[rt.Server]:
    """One task with the variables ``w`` of numbers and ``s`` of strings."""
    with rt.Server(kit.addresses(local=1), "local", 0) as made:
        with rt.Graph().as_default() as graph, rt.Session(made.target, graph) as sess:
            rt.Variable(VALUE, name="w")
            rt.Variable(np.array([b"a", b"bc"], object), name="s")
            sess.run(rt.global_variables_initializer())
            yield made


@pytest.mark.parametrize("item", [2**31, 3.5, None, np.int64(7), bytearray(b"x"), [1]])
def test_only_bytes_are_encoded_as_strings(item: object) -> None:
    """The encoder of strings refuses anything but bytes by the type's name."""
    array = np.empty((2,), object)
    array[:] = [b"fine", item]
    with pytest.raises(rt.InvalidArgumentError, match=type(item).__name__):
        string_arrays.encode_strings(array)


def assign_to(server: rt.Server, value: np.ndarray) -> None:
    """Runs a stage with the kernel ``assign``, registered by gRPC as a peer does, with a value for ``s``."""
    call = StageCall(
        Stage(
            device=Device("local", 0, "CPU", 0, "cpu"),
            variables=(),
            reads=(),
            writes=(),
            inputs=None,
            outputs=(ProgramOutput(1),),
            output_specs=None,
            program=None,
            host=(HostCall("assign", {"container": "", "variable": "s"}, (0,), 1, "s/Assign"),),
            writes_state=True,
            operations=("s/Assign",),
        ),
        0,
        (0,),
        (1,),
        {},
        {},
        (0,),
    )
    with stranger(server) as they:
        request = pb.RegisterRequest(
            incarnation=server.incarnation, call=call_to_proto(call), session=5
        )
        handle = they.worker.Register(request, timeout=60).handle
    server.worker.call(handle, 5, 1, [value])


def test_string_variable_takes_strings_only(server: rt.Server, tmp_path: pathlib.Path) -> None:
    """A string variable refuses other values and keeps its strings through a checkpoint."""
    for value in (
        np.array(2**31),
        np.array([1.5, 2.5], np.float32),
        np.array([b"x", 2**31], object),
    ):
        with pytest.raises(rt.InvalidArgumentError, match="'s' is a variable of strings"):
            assign_to(server, value)
    assign_to(server, np.array([b"x", "y"], object))
    with rt.Graph().as_default() as graph, rt.Session(server.target, graph) as sess:
        w = rt.Variable(VALUE, name="w")
        s = rt.Variable(np.array([b"", b""], object), name="s")
        path = harness.Saver([w, s]).save(sess, tmp_path / "m", 1)
        sess.run(s.assign(np.array([b"1", b"2"], object)))
        harness.Saver([w, s]).restore(sess, path)
        assert sess.run(s).tolist() == [b"x", b"y"]


@pytest.mark.parametrize(
    "fields",
    [
        {"full_shape": [2**34], "chunk": [2**34]},
        {"chunk": [2**34]},
        {"chunk": [7]},
        {"chunk": [0]},
        {"chunk": []},
        {"chunk": [6, 1]},
        {"offset": [1]},
        {"offset": [2**62], "full_shape": [2**62 + 6]},
        {"full_shape": [5]},
        {"full_shape": []},
    ],
    ids=str,
)
def test_wrong_chunks_are_refused(
    server: rt.Server, tmp_path: pathlib.Path, fields: dict[str, list[int]]
) -> None:
    """Chunks that do not fit their variable are refused, and nothing is written."""
    with stranger(server) as they:
        job = they.take([slice_of("w", VALUE, **fields)])
        with refused(INVALID, "'w'", "chunks"):
            they.order(write=ORDER.Write(job=job, directory=str(tmp_path)))
        assert list(tmp_path.iterdir()) == []
        # one that does
        job = they.take([slice_of("w", VALUE, full_shape=[12], offset=[6], chunk=[3])])
        assert they.order(write=ORDER.Write(job=job, directory=str(tmp_path))).write.files


def write_zarr(directory: pathlib.Path, shape: list[int], chunks: list[int], data: bytes) -> None:
    """A zarr array as anybody may write it, with one chunk, compressed."""
    metadata = {
        "zarr_format": 2,
        "shape": shape,
        "chunks": chunks,
        "dtype": "<f4",
        "order": "C",
        "fill_value": None,
        "filters": None,
        "compressor": {"id": "zlib", "level": 9},
    }
    directory.mkdir(parents=True)
    (directory / ".zarray").write_text(json.dumps(metadata))
    (directory / "0").write_bytes(data)


def test_dwarfing_chunk_is_refused(tmp_path: pathlib.Path) -> None:
    """A chunk that is far larger than its array is refused, and a somewhat larger one is read."""
    # A flushed block can be repeated, so that only the first one is compressed.
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    sum_of_zeros = ((1 << 30) % 65521 << 16 | 1).to_bytes(4, "big")
    bomb = b"\x78\xda" + block * 1024 + packer.flush() + sum_of_zeros
    write_zarr(tmp_path / "bomb" / "w", [6], [1 << 28], bomb)
    usual = np.zeros(1 << 10, np.float32)
    usual[:6] = VALUE
    # larger than its array
    write_zarr(tmp_path / "usual" / "w", [6], [1 << 10], zlib.compress(usual.tobytes()))
    wanted = [ArraySlice.whole("w", VALUE.shape, VALUE.dtype)]
    with pytest.raises(rt.DataLossError, match=f"'w'.*{1 << 30}"):
        list(storage.read_each(storage.Source(str(tmp_path / "bomb"), ocdbt=False), wanted))
    (found,) = storage.read_each(storage.Source(str(tmp_path / "usual"), ocdbt=False), wanted)
    assert found.tolist() == VALUE.tolist()


def test_described_strings_hold_bytes_only() -> None:
    """A payload that describes itself refuses an array of objects that are no strings."""
    array = np.empty((1,), object)
    array[0] = 2**31
    with pytest.raises(rt.InvalidArgumentError, match="int"):
        encode_dynamic([array])
    assert TensorSpec.of(array).is_string
