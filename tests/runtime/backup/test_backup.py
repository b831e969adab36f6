"""Backups of tasks: what is kept is always a whole image, replies keep the bound, and an image makes the task again."""

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import runtime as rt
from runtime.backup import image
from runtime.backup.holder import (
    BackupEntry,
    BackupHolder,
    Header,
    chunks,
    packed,
    packed_message,
    read_message,
    unpacked,
)
from runtime.backup.primary import CapturedEntry, Primary, StateCapture
from runtime.errors import AbortedError, UnavailableError
from runtime.wire.connection import Reply
from runtime.wire.reply_cache import LaneTable
from tests.kit.waits import until, until_thread_ends
from tests.runtime.kit import addresses

TASK, HOLDER = "/job:ps/task:0", "/job:ps/task:1"
NAMES = "abcd"


class Holder:
    """The other end, whose messages may get lost on their way there or back, and that may die."""

    def __init__(self) -> None:
        self.backups = BackupHolder()
        self.lose: dict[int, bool] = {}  # by number of the message, whether it had arrived
        self.count = 0

    def send(self, header: Header, arrays: Sequence[Any]) -> tuple[Header, Sequence[Any]]:
        self.count += 1
        before = self.lose.get(self.count)
        if before is False:
            raise UnavailableError("lost on the way", task=HOLDER)
        answer = self.backups.answer(*read_message(packed_message(header, arrays)))
        if before is True:
            raise UnavailableError("lost on the way back", task=HOLDER)
        return answer


class Source:
    """A task that is nothing but named numbers."""

    def __init__(self) -> None:
        self.state: dict[str, int] = {}
        self.unusable_because = ""

    def capture(self, _: Any) -> StateCapture:
        state = {} if self.unusable_because else dict(self.state)
        return StateCapture(
            self.unusable_because,
            {n: CapturedEntry(v, lambda v=v: number(v)) for n, v in state.items()},
            lambda: None,
        )


def number(value: int) -> BackupEntry:
    return BackupEntry({"value": value}, (np.full(8, value),))


def made(
    source: Source, holder: Holder, lag: int = 0, process_id: int = 1, fenced: Any = lambda: None
) -> Primary:
    return Primary(
        TASK,
        HOLDER,
        lag,
        process_id,
        {"lag": lag},
        source.capture,
        holder.send,
        fenced,
        chunk_bytes=128,
    )


def kept(holder: Holder) -> dict[str, int] | None:
    """What the holder could give back."""
    found = image.read(lambda header: holder.backups.answer(header, ()), TASK, 7)
    if isinstance(found, str):
        return None
    assert all((e.arrays[0] == e.meta["value"]).all() for e in found.entries.values())
    return {name: entry.meta["value"] for name, entry in found.entries.items()}


CHANGES = st.tuples(st.sampled_from(NAMES), st.none() | st.integers(0, 9))
TURNS = st.tuples(
    st.lists(CHANGES, max_size=4),
    st.dictionaries(st.integers(1, 6), st.booleans(), max_size=2),
    st.sampled_from(["", "", "", "dies", "drops", "unusable_because"]),
)


@given(st.lists(TURNS, max_size=12))
def test_kept_image_is_always_whole(turns: list[Any]) -> None:
    """The holder keeps a whole image whichever messages are lost."""
    source, holder = Source(), Holder()
    primary = made(source, holder)
    states: dict[int, dict[str, int]] = {}
    version = 0
    for changes, lose, event in turns:
        if event == "dies":
            holder.backups = BackupHolder()
        elif event == "drops":
            holder.backups.drop_all()
        source.unusable_because = "for a reason" if event == "unusable_because" else ""
        for name, value in changes:
            source.state.pop(name, None)
            if value is not None:
                source.state[name] = value
            primary.count()
            version += 1
        states[version] = dict(source.state)
        holder.lose = {holder.count + n: arrived for n, arrived in lose.items()}
        lost = False
        try:
            primary._replicate()
        except UnavailableError:
            primary._sender.forget()  # as its thread does
            lost = True
        primary.validate()
        found = image.read(lambda header: holder.backups.answer(header, ()), TASK, 1)
        if not isinstance(found, str):
            assert {n: e.meta["value"] for n, e in found.entries.items()} == states[found.version]
        if not lost and not source.unusable_because:
            assert not isinstance(found, str) and found.version == version
        if not lost and source.unusable_because:
            assert isinstance(found, str)


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 40)), st.integers(1, 100))
def test_pieces_are_whole_and_small(sizes: dict[str, int], limit: int) -> None:
    """The pieces of an image hold every entry once and keep their limit of bytes."""
    entries = {name: BackupEntry(name, (np.zeros(size, np.uint8),)) for name, size in sizes.items()}
    messages = chunks(entries, limit)
    assert list(itertools.chain.from_iterable(messages)) == list(entries)
    assert all(
        len(chunk) == 1 or sum(e.nbytes for e in chunk.values()) <= limit
        for chunk in messages
        if chunk
    )
    again = [unpacked(*packed(chunk)) for chunk in messages]
    assert {n: e.arrays[0].size for chunk in again for n, e in chunk.items()} == sizes


@pytest.mark.parametrize("lag", [0, 1, 5])
def test_reply_keeps_the_lag_bound(lag: int) -> None:
    """No reply leaves the backup further behind than its bound."""
    source, holder = Source(), Holder()
    primary = made(source, holder, lag)
    primary.start()

    def update() -> Reply:
        source.state["a"] = source.state.get("a", 0) + 1
        primary.count()
        return Reply([], remember=True)

    for _ in range(1, 100):
        primary.carry_out(update, 1, gated=True)
        assert primary.values()["backup_lag_steps"] <= lag
        primary.validate()
    primary.settle()
    assert kept(holder) == {"a": 99}
    assert primary.values()["backup_lag_steps"] == 0
    assert primary.values()["backup_usable"] == 1
    primary.close()


def test_greatest_lag_counts_updates() -> None:
    """Before the first image the greatest lag is the number of updates."""
    primary = made(Source(), Holder())
    primary.count()
    assert primary.values()["backup_lag_steps_max"] == 1


def test_lost_holder_holds_nobody_up() -> None:
    """A task answers while its holder is lost, and fills the backup when the holder is back."""
    source, holder = Source(), Holder()
    primary = made(source, holder)
    holder.lose = dict.fromkeys(range(1, 10_000), False)
    primary.start()
    source.state["a"] = 1
    primary.carry_out(lambda: Reply([]), 1, gated=False)
    assert "lost on the way" in primary.problem
    holder.lose = {}
    waiting = threading.Event()  # never set
    while primary.problem and not waiting.wait(0.01):
        pass
    assert kept(holder) == {"a": 1}
    primary.close()


def test_first_backup_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A task says that it has a backup when that is true for the first time, and not before."""
    source, holder = Source(), Holder()
    holder.lose = {1: False}
    with caplog.at_level("INFO", "absl"):
        primary = made(source, holder)
        primary.start()
        # The first image is that of a task without variables.
        primary.settle()
        source.unusable_because = "its variables are being given values"
        primary.count()
        primary.settle()
        until(lambda: "has no backup now: its" in caplog.text)
        assert "from now on" not in caplog.text
        source.unusable_because = ""
        for _ in range(2):
            primary.count()
            primary.settle()
        until(lambda: "from now on" in caplog.text)
        primary.close()
    assert caplog.text.count(f"has a backup at {HOLDER} from now on") == 1
    assert "again" not in caplog.text


def test_replaced_process_answers_nobody() -> None:
    """A process whose place another one has taken refuses every call and leaves."""
    source, holder, left = Source(), Holder(), threading.Event()
    old = made(source, holder, process_id=1, fenced=left.set)
    old.start()
    old.settle()
    assert kept(holder) == {}  # takes it up, as life 7
    old.count()
    for gated in (False, True):
        with pytest.raises(AbortedError, match="taken the place"):
            old.carry_out(lambda: Reply([]), 1, gated=gated)
    assert left.is_set()
    new = made(source, holder, process_id=7)
    new.start()
    new.settle()
    assert new.problem == ""
    new.close()


def test_order_fails_without_holder_answer() -> None:
    """An order fails if the holder does not answer, since the backup may lack its effect."""
    answers = threading.Event()

    class Dawdling(Holder):
        def send(self, header: Header, arrays: Sequence[Any]) -> tuple[Header, Sequence[Any]]:
            answers.wait()
            return super().send(header, arrays)

    primary = made(Source(), Dawdling())
    primary.start()
    primary.count()
    with pytest.raises(UnavailableError, match="has not got this"):
        primary.settle(0.05)
    answers.set()
    primary.settle()
    primary.close()


@pytest.mark.parametrize("gated", [True, False])
def test_stopping_task_answers_only_backed_up(gated: bool) -> None:
    """A stopping task refuses a call whose effect the backup lacks, so that the caller repeats the
    call.
    """
    answers, changed = threading.Event(), threading.Event()

    class Dawdling(Holder):
        def send(self, header: Header, arrays: Sequence[Any]) -> tuple[Header, Sequence[Any]]:
            if changed.is_set():
                answers.wait()
            return super().send(header, arrays)

    primary = made(Source(), Dawdling())
    primary.start()
    primary.settle()

    def change() -> Reply:
        changed.set()
        primary.count()
        return Reply([])

    with ThreadPoolExecutor(1) as caller:
        reply = caller.submit(primary.carry_out, change, 1, gated=gated)
        assert changed.wait(60)
        primary.close()
        with pytest.raises(UnavailableError, match="had not got this when it stopped"):
            reply.result(60)
        answers.set()
    until_thread_ends(f"backup of {TASK}")


def test_replaced_process_cannot_introduce_itself() -> None:
    """A process that was frozen before its first message does not take the next process's place."""
    holder = Holder()
    first, second = (made(Source(), holder, process_id=number) for number in (1, 2))
    for number in (1, 2):
        image.read(lambda header: holder.backups.answer(header, ()), TASK, number)
    second.start()
    second.settle()
    first.start()
    with pytest.raises(AbortedError, match="taken the place"):
        first.carry_out(lambda: Reply([]), 1, gated=False)
    second.count()
    second.settle()
    second.close()


class Client:
    gone = False


def test_inherited_lanes_answer_others_are_welcome() -> None:
    """An inherited lane answers from memory, and an unknown lane is welcome until the given time."""
    table: LaneTable[str] = LaneTable()
    table.inherit({(1, 2): (5, "five")}, 100.0, 700.0)
    owner = Client()
    record, known, _ = table.attach(1, 2, 3, owner, 100.0)
    assert known
    assert record.begin(owner, 5) == "five"
    assert record.begin(owner, 6) is None
    other = Client()
    fresh, known, _ = table.attach(9, 9, 4, other, 100.0)
    assert known  # nothing of it is left: its call runs
    assert fresh.begin(other, 17) is None
    table.expire(50.0)
    assert len(table) == 2
    assert not table.attach(9, 8, 1, Client(), 700.0)[1]  # by now this life may have forgotten it


@contextlib.contextmanager
def backed_up(cluster: dict[str, list[str]], index: int) -> Iterator[rt.Server]:
    with rt.Server(cluster, "ps", index, ps_backups=1, ps_backups_lag=3) as server:
        yield server


VALUES = {
    "float": np.arange(6, dtype=np.float32).reshape(2, 3),
    "double": np.array(1e-300),
    "long": np.array([2**62, -1], np.int64),
    "half": np.asarray(jnp.asarray([1.5, -2.0], jnp.bfloat16)),
    "flag": np.array([True, False]),
    "empty": np.zeros((0, 4), np.float32),
}


def test_task_returns_from_its_image() -> None:
    """A task that starts again has the values and the incarnation of its backup."""
    cluster = addresses(ps=2, worker=1)
    with rt.Graph().as_default(), rt.Server(cluster, "worker", 0) as worker, backed_up(cluster, 0):
        with rt.device("/job:ps/task:1"):
            made = {
                name: rt.Variable(value, dtype=value.dtype, name=name)
                for name, value in VALUES.items()
            }
            made["words"] = rt.Variable(np.array(["one", "two"], object), name="words")
            add = made["float"].assign_add(np.ones((2, 3), np.float32))
        initialise = rt.global_variables_initializer()
        with backed_up(cluster, 1) as before, rt.Session(worker.target) as session:
            session.run(initialise)
            for _ in range(10):
                session.run(add.op)
            incarnation = before.incarnation
        with backed_up(cluster, 1) as again, rt.Session(worker.target) as session:
            assert (again.incarnation, again.takeovers) == (incarnation, 1)
            found = session.run(made)
            session.run(add.op)
            assert session.run(made["float"])[0, 0] == 11
    for name, value in VALUES.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value + 10 if name == "float" else value)
    assert found["words"].tolist() == [b"one", b"two"]


def test_impossible_backup_is_explained() -> None:
    """A task whose queue cannot be backed up says so, and so does the record of the next process."""
    cluster = addresses(ps=2, worker=1)
    with rt.Graph().as_default(), rt.Server(cluster, "worker", 0) as worker, backed_up(cluster, 0):
        with backed_up(cluster, 1) as server, rt.Session(worker.target) as session:
            with rt.device("/job:ps/task:1"):
                queue = rt.FIFOQueue(3, [np.float32], shapes=[()], name="numbers")
                put = queue.enqueue(rt.constant(1.0))
            session.run(put)
            assert server.worker.primary is not None
            server.worker.primary.count()
            server.worker.primary.settle()
            assert "it holds numbers" in server.worker.primary.problem
        with backed_up(cluster, 1) as again:
            assert again.takeovers == 0
            assert "it holds numbers" in again.worker.store.run.origin


@pytest.mark.parametrize(
    ("ps", "options", "says"),
    [
        (1, {"ps_backups": 1}, "needs two tasks"),
        (2, {"ps_backups": 2}, "one backup"),
        (2, {"ps_backups": 1, "ps_backups_lag": -1}, "0 or more"),
    ],
)
def test_wrong_numbers_are_refused(ps: int, options: dict[str, int], says: str) -> None:
    """Numbers of backups or a lag that cannot work are refused."""
    with pytest.raises(rt.InvalidArgumentError, match=says):
        rt.Server(addresses(ps=ps), "ps", 0, **options)
