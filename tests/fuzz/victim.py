"""A ps in a process of its own and a worker that trains on it, beside whatever is sent to the ps.

Whoever is let in sends what it likes: nothing of that may end the process, leak memory or
descriptors, or cost the worker a step.
"""

from __future__ import annotations

import contextlib
import pathlib
import threading
from typing import Final, Self

import numpy as np
import psutil

import runtime as rt
from runtime import limits
from runtime.cluster.endpoint import FAST_PATH_VARIABLE
from runtime.proto import services_pb2 as pb
from runtime.proto import services_pb2_grpc
from runtime.rpc import rpc
from runtime.trust.security import VARIABLE, Security, find_token
from tests.runtime import kit

PS: Final = "/job:ps/task:0"
MEMORY: Final = 256 << 20
"""By how much the ps may grow after the first part of what is sent: lanes and refusals are remembered for minutes."""
_PATIENT: Final = {limits.VARIABLE: "hello_secs=120"}
"""For handshakes: whoever hangs up is noticed by that, and nobody is cut off because the machine is busy."""
DESCRIPTORS: Final = 64
THREADS: Final = 64


class Victim:
    """The ps, its address, and the training.

    Args:
        certificates: directory with those of both tasks, which then talk over TLS alone; by default
            they have a token.

    Attributes:
        address: of its control plane.
        data_port: of its tensor channel.
        key: its token, empty with certificates.
        steps: that the worker has done.
    """

    def __init__(self, certificates: pathlib.Path | None = None) -> None:
        self._certificates = certificates
        self._stack = contextlib.ExitStack()
        self.steps = 0
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._moved = threading.Condition()
        self._first: tuple[int, int, int] | None = None

    def __enter__(self) -> Self:
        """Starts all of it."""
        cluster = kit.addresses(ps=1, worker=1)
        (self.address,) = cluster["ps"]
        with self._stack:
            security, env = None, dict[str, str]()
            if self._certificates is not None:
                security = Security(certificates=self._certificates)
                env = {VARIABLE: str(self._certificates), FAST_PATH_VARIABLE: "0", **_PATIENT}
            (self._process,) = self._stack.enter_context(kit.processes(cluster, ("ps", 0), env=env))
            worker = self._stack.enter_context(rt.Server(cluster, "worker", 0, security=security))
            with rt.Graph().as_default() as graph, rt.device(PS):
                self._w = rt.Variable(np.zeros(3, np.int32), name="w")
                self._step = self._w.assign_add(np.ones(3, np.int32))
                initialize = rt.global_variables_initializer()
            self._session = self._stack.enter_context(rt.Session(worker.target, graph))
            self._session.run(initialize)
            token = find_token(self.address, security, 60)
            assert (token is None) == (security is not None)
            self.key = b"" if token is None else token.key
            self._thread = threading.Thread(target=self._train, name="trains")
            self._thread.start()
            self._stack.callback(self._stop)
            status = rt.probe(self.address, 60)
            self.incarnation = status.incarnation
            with rpc.open_channel(self.address) as channel:
                asked = services_pb2_grpc.WorkerServiceStub(channel).Status(
                    pb.StatusRequest(), timeout=60
                )
            self.data_port = int(asked.data_port)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Sees that no step was lost, and ends it."""
        with self._stack:
            self._stop()
            if kind is not None:
                print(self._process.story())
            else:
                assert self._failure is None, self._failure
                assert self._session.run(self._w).tolist() == [self.steps] * 3

    def _stop(self) -> None:
        self._over.set()
        self._thread.join(60)

    def _train(self) -> None:
        try:
            while not self._over.wait(0.002):  # beside what is sent, not instead of it
                self._session.run(self._step)
                with self._moved:
                    self.steps += 1
                    self._moved.notify_all()
        except BaseException as error:
            self._failure = error
            with self._moved:
                self._moved.notify_all()

    def lives(self) -> None:
        """Sees that the ps is the same process, that training goes on, and that nothing grows."""
        with self._moved:
            goal = self.steps + 3
            assert self._moved.wait_for(
                lambda: self.steps >= goal or self._failure is not None, 120
            )
        assert self._failure is None, self._failure
        assert self._process.code is None
        memory, descriptors, threads = found = self.figures()
        if self._first is None:
            self._first = found
        assert memory < self._first[0] + MEMORY, (
            f"{memory >> 20} MB of memory, {self._first[0] >> 20} before"
        )
        assert descriptors < self._first[1] + DESCRIPTORS, (
            f"{descriptors} descriptors, {self._first[1]} before"
        )
        assert threads < self._first[2] + THREADS, f"{threads} threads, {self._first[2]} before"

    def figures(self) -> tuple[int, int, int]:
        """Resident bytes, descriptors and threads of the ps."""
        process = psutil.Process(self._process.pid)
        return process.memory_info().rss, process.num_fds(), process.num_threads()

    def story(self) -> str:
        """How it went."""
        memory, descriptors, threads = self.figures()
        return f"{self.steps} steps beside it; {memory >> 20} MB, {descriptors} descriptors, {threads} threads"
