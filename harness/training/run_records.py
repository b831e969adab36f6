"""Run records: what the chief and the workers tell each other by way of the tasks that hold the variables.

Every task of a cluster keeps a small record of the training run (its phases and actions are described in
``runtime/state/run_record.py``). This is the client of all those records at once: the chief's orders, and what
everybody reports. A call opens a session of its own, so it works while training's own session is broken or blocked.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import runtime as rt

ANSWER_SECS = 10.0
"""How long one exchange with the tasks may take by default, beyond what it waits for on purpose."""


@dataclass(frozen=True)
class RunRecordView:
    """The record of one task.

    Attributes:
        address: of the task.
        phase: "new", "loading", "ready" or "finished".
        leader: the number of the chief that leads; 0 when nobody does.
        chief: that chief and its address, in words; empty when nobody leads.
        generation: how often values were replaced under sessions that used them.
        joined: tasks that have taken part.
        addresses: of these, as far as they told them.
        done: tasks that need this one no more.
        silent: by task that has joined and is not done, for how long it has given no sign of life there, seconds.
        saved_step: of the last checkpoint of a run that has finished; None when nobody has told.
        origin: why the task started without the values that it should have had a backup of.
        logdir: log directory of the run that the task's values belong to; empty when nobody has told.
    """

    phase: str = "new"
    leader: int = 0
    chief: str = ""
    generation: int = 0
    joined: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    origin: str = ""
    logdir: str = field(default="", kw_only=True)
    addresses: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    silent: Mapping[str, float] = field(default_factory=dict)
    saved_step: int | None = None


class RunRecords:
    """The run records of the tasks that hold variables (the ps tasks, where there are any).

    Args:
        target: session target; its task is the one that speaks.
        config: options of the sessions; its device filters say which tasks count.
        is_chief: whether this task may lead.
    """

    def __init__(self, target: str, config: rt.SessionConfig | None = None, *, is_chief: bool = False) -> None:
        self._target = target
        self.answer_secs = ANSWER_SECS
        """How long one exchange may take beyond what it waits for on purpose."""
        self._config = config or rt.SessionConfig()
        self._number = secrets.randbits(62) + 1 if is_chief else 0
        self._took_part: frozenset[str] = frozenset()
        """All of whom any record has told: one that is started again has forgotten who was there before."""

    def inspect(self) -> dict[str, RunRecordView]:
        """The records as they are, by task name.

        Raises:
            UnavailableError, AbortedError: a task is not there, or has restarted just now.
        """
        return self._request("inspect")

    def claim(self) -> dict[str, RunRecordView]:
        """Takes the lead: from now on the orders of any other chief are refused."""
        return self._request("claim")

    def load(self) -> bool:
        """Orders the tasks to let nobody train while this chief replaces values.

        Returns:
            Whether any task had values, so that the sessions that used them, the caller's too, are cut off.

        Raises:
            PermissionDeniedError: another chief has taken the lead; names it.
        """
        before = self.inspect()
        return any(
            r.generation != before[task].generation for task, r in self._request("load").items() if task in before
        )

    def open(self, logdir: str = "") -> None:
        """Orders the tasks to let everybody train.

        Args:
            logdir: log directory of the run that the values belong to now; empty changes nothing.

        Raises:
            PermissionDeniedError: another chief leads.
        """
        self._request("open", logdir=logdir)

    def finish(
        self, silence_secs: float, counter: tuple[str, str] | None = None, saved_step: int | None = None
    ) -> None:
        """Tells the tasks that training is over.

        Args:
            silence_secs: who is not done, and gives no sign of life for so long, is not waited for any longer.
            counter: the global step's (container, name).
            saved_step: its value in the last checkpoint; None when there is none.
        """
        known = sorted(self._took_part)
        self._request("finish", silence_secs=silence_secs, counter=counter, saved_step=saved_step, took_part=known)

    def leads(self) -> bool:
        """Whether no other chief has taken the lead; a task that has just restarted knows of none."""
        return all(record.leader in (0, self._number) for record in self.inspect().values())

    def join(self, session: int = 0) -> None:
        """Tells the tasks that this one takes part.

        Args:
            session: the session that it trains in: as long as that gives signs of life, the task lives.
        """
        self._request("join", session=session)

    def rest(self, session: int) -> None:
        """Tells the tasks that this one trains no more in a session, though it still needs them."""
        self._request("rest", session=session)

    def done(self, leave: bool, session: int = 0) -> dict[str, RunRecordView]:
        """Tells the tasks that this one needs them no more.

        Args:
            leave: they may go when nobody needs them; False when somebody else (a launcher) ends them.
            session: that it has trained in.
        """
        return self._request("done", leave=leave, session=session)

    def wait_loaded(self, timeout_secs: float) -> bool:
        """Waits until no chief is loading; returns whether that is so now."""
        answer = self._request("wait_loaded", wait=timeout_secs)
        return all(record.phase != "loading" for record in answer.values())

    def wait_done(self, timeout_secs: float) -> dict[str, float]:
        """Waits until all other tasks that take part are done.

        Returns:
            Those that are not, with their addresses, and for how long they have given no sign of life to any of the
            tasks, seconds; infinite when they never gave one.
        """
        records = self._request("wait_done", wait=timeout_secs)
        addresses = {name: address for record in records.values() for name, address in record.addresses.items()}
        silences = [record.silent for record in records.values()]
        return {
            at(name, addresses.get(name, "")): min((silent[name] for silent in silences if name in silent), default=inf)
            for name in others(records, self.task)
        }

    @property
    def task(self) -> str:
        """Name of this task; known after the first exchange."""
        return self._task

    _task = ""

    def _request(self, action: str, *, wait: float = 0.0, **arguments: Any) -> dict[str, RunRecordView]:
        try:
            return self._exchange(action, wait, arguments)
        except rt.DeadlineExceededError as error:
            raise rt.UnavailableError(error.message, task=error.task) from None

    def _exchange(self, action: str, wait: float, arguments: Mapping[str, Any]) -> dict[str, RunRecordView]:
        config = replace(self._config, start_timeout_secs=self.answer_secs, reconnect_secs=self.answer_secs)
        with rt.Graph().as_default(), rt.Session(self._target, config=config) as session:
            self._task = session.task
            message = {
                "action": action,
                "task": session.task,
                "leader": self._number,
                "name": session.task,
                "address": self._target.removeprefix("grpc://"),
                "timeout_secs": wait,
                **arguments,
            }
            answers = {}
            for name in _holders(session):
                with rt.device(name):
                    op = rt.host_call(
                        "run_record", [json.dumps(message)], [((), object)], stateful=True, resource="run_record"
                    )
                answers[name] = op.outputs[0]
            found = session.run(answers, timeout_secs=wait + self.answer_secs)
        records = {name: _record(json.loads(answer)) for name, answer in found.items()}
        self._took_part = self._took_part.union(*(record.joined for record in records.values()))
        return records


def at(task: str, address: str) -> str:
    """A task and where it is, in words; the address may be unknown."""
    return f"{task} at {address}" if address else task


def others(records: Mapping[str, RunRecordView], own: str) -> list[str]:
    """The tasks, but ``own``, that take part by any of ``records`` and are not done."""
    joined = dict.fromkeys(task for record in records.values() for task in record.joined)
    done = {task for record in records.values() for task in record.done}
    return [task for task in joined if task not in done and task != own]


def _holders(session: rt.Session) -> list[str]:
    """The tasks whose records count: all of job ps; where there is none, the first task that the session sees."""
    names = dict.fromkeys(f"/job:{d.job}/task:{d.task}" for d in session.list_devices())
    ps = [name for name in names if name.startswith("/job:ps/")]
    return ps or sorted(names)[:1]


def _record(answer: Mapping[str, Any]) -> RunRecordView:
    return RunRecordView(
        answer["phase"],
        answer["leader"],
        at(answer["leader_name"], answer["leader_address"]),
        answer["generation"],
        tuple(answer["joined"]),
        tuple(answer["done"]),
        answer["origin"],
        answer["addresses"],
        answer["address"],
        answer["silent"],
        answer["saved_step"],
        logdir=answer["logdir"],
    )
