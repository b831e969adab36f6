"""Writes down what a version leaves behind and says, for those that come after it.

python -m tests.compatibility.record VERSION makes tests/compatibility/VERSION with

    checkpoint/              a checkpoint of every kind of variable (model.py)
    messages.binpb           the messages of both planes, as a FileDescriptorSet
    init, step, read.txtpb   the stages of a client that initialises, trains and reads a model
    hello.txt                the wire version

It is run once, by the version itself. A directory that is there is never written again.
"""

import contextlib
import multiprocessing
import pathlib
import shutil
import sys
import tempfile
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, text_format

import runtime as rt
from runtime.proto import services_pb2
from runtime.rpc import rpc
from runtime.wire.versions import WIRE_VERSION
from tests.compatibility import model

HERE = pathlib.Path(__file__).parent
STAGES = ("init", "step", "read")


def _descriptors() -> descriptor_pb2.FileDescriptorSet:
    found: dict[str, Any] = {}

    def add(file: Any) -> None:
        for other in file.dependencies:
            add(other)
        found.setdefault(file.name, file)

    add(services_pb2.DESCRIPTOR)
    made = descriptor_pb2.FileDescriptorSet()
    for file in found.values():
        file.CopyToProto(made.file.add())
    return made


def _serve(ports: "list[str]") -> None:
    rt.Server(_cluster(ports), "ps", 0).join()


def _cluster(ports: "list[str]") -> rt.ClusterSpec:
    return rt.ClusterSpec({"ps": ports[:1], "worker": ports[1:]})


def _stages() -> dict[str, str]:
    """What a client registers on a ps: to initialise two variables, to train a step, to read them."""
    registered: list[services_pb2.RegisterRequest] = []
    make = rpc.call

    def noting(method: Any, request: Any, **options: Any) -> Any:
        if isinstance(request, services_pb2.RegisterRequest):
            kept = services_pb2.RegisterRequest()
            kept.CopyFrom(request)
            if kept.call.stage.program.blob or not kept.call.stage.HasField("program"):
                registered.append(kept)
        return make(method, request, **options)

    with rt.local_cluster(ps=1, workers=1) as free:
        ports = [free.cluster.task_address(job, 0) for job in ("ps", "worker")]
    ps = multiprocessing.get_context("spawn").Process(target=_serve, args=(ports,))
    ps.start()
    rpc.call = noting
    try:
        with rt.Server(_cluster(ports), "worker", 0) as server, rt.Graph().as_default():
            with rt.device("/job:ps/task:0"):
                weights = rt.Variable(np.array([1, 2, 3], np.float32), name="weights")
                count = rt.Variable(np.int32(0), name="count")
            gradient = rt.placeholder("float32", [3], name="gradient")
            with rt.device("/job:ps/task:0"):
                train = [weights.assign_sub(gradient * 0.5).op, count.assign_add(1).op]
            with rt.Session(server.target) as session:
                session.run(rt.global_variables_initializer())
                session.run(train, {gradient: np.ones(3, np.float32)})
                session.run([weights, count])
    finally:
        rpc.call = make
        ps.kill()
    unique = {}
    for request in registered:
        request.incarnation = request.session = request.generation = 0
        unique.setdefault(request.SerializeToString(deterministic=True), request)
    return dict(zip(STAGES, map(text_format.MessageToString, unique.values()), strict=True))


def main(version: str) -> None:
    """Writes the directory of a version."""
    directory = HERE / version
    directory.mkdir()
    with contextlib.ExitStack() as stack:
        run = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model.save(run)
        shutil.copytree(run / "model.ckpt", directory / "checkpoint" / "model.ckpt")
    (directory / "messages.binpb").write_bytes(_descriptors().SerializeToString(deterministic=True))
    for name, text in _stages().items():
        (directory / f"{name}.txtpb").write_text(text)
    (directory / "hello.txt").write_text(f"{WIRE_VERSION}\n")


if __name__ == "__main__":
    main(sys.argv[1])
