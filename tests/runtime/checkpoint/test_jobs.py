"""The jobs of a task in any order of what happens to them."""

import contextlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from runtime.checkpoint.jobs import CheckpointJob, JobTable, Sender
from runtime.errors import AbortedError, OpError
from runtime.limits import Limits
from runtime.state.cancellation import Cancellation
from runtime.state.leadership import Leadership
from runtime.state.write_gate import WriteGate

JOB_TURNS = st.tuples(
    st.sampled_from(["begin", "find", "work", "rest", "end", "another chief", "session ends"]),
    st.integers(1, 4),
    st.integers(1, 2),
)


@given(st.lists(JOB_TURNS, max_size=30))
def test_jobs_end_once_and_leave_nothing(turns: list[tuple[str, int, int]]) -> None:
    """A job under way belongs to the present chief, and an ended job accepts no order."""
    epoch, gate = 1, WriteGate()

    def check(leadership: Leadership) -> None:
        if leadership.epoch != epoch:
            raise AbortedError("another chief leads")

    table = JobTable(
        "/job:ps/task:0", gate, check, Limits(checkpoint_jobs=4), lambda session: session == 1
    )
    under_way: dict[int, tuple[CheckpointJob, int]] = {}
    ended: set[int] = set()
    at_work: dict[int, tuple[CheckpointJob, contextlib.AbstractContextManager[None]]] = {}
    cut_off = Cancellation()
    cut_off.set("the caller hung up")

    table.serve(Leadership(epoch, 7), 0, cut_off)

    def end(numbers: Any) -> None:
        ended.update(numbers)
        for number in numbers:
            under_way.pop(number, None)

    for what, number, session in turns:
        if what == "begin":
            job = CheckpointJob(Sender(Leadership(epoch, 7), session), [])
            try:
                assert table.begin(number, job) is under_way.setdefault(number, (job, session))[0]
                assert number not in ended
            except OpError:
                assert number in ended or (session != 1 and number not in under_way)
        elif what == "find" and number in under_way:
            assert table.find(number) is under_way[number][0]
        elif what == "work" and number in under_way and number not in at_work:
            reserved = table.reserve(under_way[number][0], cut_off, "a test")
            reserved.__enter__()
            at_work[number] = under_way[number][0], reserved
        elif what == "rest" and number in at_work:
            _, reserved = at_work.pop(number)
            reserved.__exit__(None, None, None)
        elif what == "end":
            table.end([number], "it was dropped")
            end([number])
        elif what == "session ends":
            table.end_session(session, "it has ended")
            end([n for n, (_, owner) in under_way.items() if owner == session])
        elif what == "another chief":
            epoch += 1
            try:
                table.serve(Leadership(epoch, 7), 0, cut_off)
                assert not at_work.keys() & under_way.keys()
            except OpError:
                assert at_work
            end(list(under_way))
        table.validate()
        assert all(job.why for n, (job, _) in at_work.items() if n not in under_way)
        assert all(table.get(n) is job for n, (job, _) in under_way.items())
    table.close()
    for _, reserved in at_work.values():
        reserved.__exit__(None, None, None)
    table.validate()
    assert not any(table.get(number) for number in range(5))
