"""Sequences of valid orders to a task, by hypothesis: whoever leads takes, writes, reads, compares, commits and drops.

Beside a worker that trains on the same task. A restored value belongs to a variable of its own, so
that each step of the worker counts.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import grpc
import hypothesis
import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from runtime.master.tasks import RemoteTask
from runtime.proto import run_record_pb2, services_pb2_grpc
from runtime.rpc import rpc
from runtime.state.leadership import Leadership
from runtime.wire.dial import ChannelOptions
from tests.fuzz.victim import PS, Victim
from tests.runtime.stranger import ORDER, slice_of

EXPECTED: Final = {
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""What an order may be refused by: each says what is wrong with it."""
STEPS: Final = 40
"""Orders in one sequence."""
JOBS: Final = st.integers(0, 4)
NAMES: Final = st.sampled_from(["w", "other", "no such", ""])
STORES: Final = ("ocdbt.process_1jobpstask0", "ocdbt.process_2jobpstask0")


def machine(victim: Victim, root: Path) -> type[RuleBasedStateMachine]:
    """Sequences of orders to a task, whose checkpoints lie below a directory."""

    class Orders(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.channel = rpc.open_channel(victim.address)
            self.worker = services_pb2_grpc.WorkerServiceStub(self.channel)
            self.owner, self.epoch = 4711, 0
            self.session = secrets.randbits(62) | 1
            self.first = secrets.randbits(62)  # the numbers of jobs are of this sequence alone
            self.task = RemoteTask(PS, victim.address, self.session, ChannelOptions())
            self.task.peer.release(self.task.peer.acquire())
            self.directory = Path(tempfile.mkdtemp(dir=root))

        def teardown(self) -> None:
            for job in range(5):
                self.order(drop=ORDER.Drop(job=job))
            self.task.close(self.session)
            self.channel.close()
            shutil.rmtree(self.directory, ignore_errors=True)
            victim.lives()

        def order(self, **order: Any) -> Any:
            leadership = Leadership(self.epoch, self.owner).to_proto()
            for kind in order.values():
                if "job" in kind.DESCRIPTOR.fields_by_name:
                    kind.job += self.first
            try:
                message = ORDER(leadership=leadership, session=self.session, **order)
                return self.worker.Checkpoint(message, timeout=120)
            except grpc.RpcError as error:
                return self.refused(error)

        def refused(self, error: grpc.RpcError) -> None:
            # which is the client's
            assert error.code() in EXPECTED and error.details() != "Deadline Exceeded", error
            assert "\n" not in (error.details() or "")

        def run(self, **order: Any) -> Any:
            leadership = Leadership(self.epoch, self.owner).to_proto()
            message = run_record_pb2.RunOrder(
                incarnation=victim.incarnation, leadership=leadership, **order
            )
            try:
                return self.worker.Run(message, timeout=120)
            except grpc.RpcError as error:
                return self.refused(error)

        @rule(above=st.integers(0, 2), owner=st.sampled_from([1, 4711]))
        def claim(self, above: int, owner: int) -> None:
            said = self.run(inspect=run_record_pb2.RunOrder.Inspect())
            self.epoch, self.owner = said.leadership.epoch + above, owner
            self.run(claim=run_record_pb2.RunOrder.Claim())

        @rule(job=JOBS, seconds=st.sampled_from([0.0, 0.01, -1.0]))
        def pause(self, job: int, seconds: float) -> None:
            self.order(pause=ORDER.Pause(job=job, seconds=seconds))

        @rule(job=JOBS, names=st.lists(NAMES, max_size=3), paused=st.booleans())
        def take(self, job: int, names: list[str], paused: bool) -> None:
            if paused:
                self.order(pause=ORDER.Pause(job=job, seconds=5.0))
            self.order(
                take=ORDER.Take(
                    job=job, slices=[slice_of(name, np.zeros(3, np.int32)) for name in names]
                )
            )
            self.order(drop=ORDER.Drop(job=job + 100))

        @rule(job=JOBS)
        def write(self, job: int) -> None:
            self.order(write=ORDER.Write(job=job, directory=str(self.directory)))

        @rule(job=JOBS)
        def confirm(self, job: int) -> None:
            self.order(confirm=ORDER.Confirm(job=job))

        @rule(job=JOBS, below=st.sampled_from([*STORES, "nowhere", "../.."]))
        def read(self, job: int, below: str) -> None:
            self.order(
                read=ORDER.Read(
                    job=job,
                    directory=str(self.directory / below),
                    slices=[slice_of("other", np.zeros(3, np.int32))],
                )
            )

        @rule(job=JOBS)
        def receive(self, job: int) -> None:
            self.order(
                receive=ORDER.Receive(job=job, slices=[slice_of("other", np.zeros(3, np.int32))])
            )

        @rule(job=JOBS)
        def commit(self, job: int) -> None:
            self.order(commit=ORDER.Commit(job=job, origin=7))

        @rule(job=JOBS)
        def drop(self, job: int) -> None:
            self.order(drop=ORDER.Drop(job=job))

        @rule(job=JOBS)
        def changed(self, job: int) -> None:
            self.order(
                changed=ORDER.Changed(job=job, slices=[slice_of("w", np.zeros(3, np.int32))])
            )

        @rule()
        def states(self) -> None:
            self.order(states=ORDER.States())

        @rule(
            who=st.sampled_from(["/job:worker/task:7", "/job:worker/task:8"]),
            session=st.integers(1, 9),
        )
        def join_and_rest(self, who: str, session: int) -> None:
            self.run(sender=who, join=run_record_pb2.RunOrder.Join())
            self.run(sender=who, rest=run_record_pb2.RunOrder.Rest())

    return Orders


def fuzz(count: int, seed: int) -> str:
    """Gives so many orders, in sequences."""
    sequences = max(1, count // STEPS)
    with tempfile.TemporaryDirectory() as place, Victim() as victim:
        made = hypothesis.seed(seed)(machine(victim, Path(place)))
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            made,
            settings=hypothesis.settings(
                max_examples=sequences,
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                suppress_health_check=list(hypothesis.HealthCheck),
            ),
        )
        return f"{sequences} sequences of up to {STEPS} orders; {victim.story()}"
