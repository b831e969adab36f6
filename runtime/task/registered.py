"""A stage call as a task keeps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from runtime.observe.trace import TracedStage
from runtime.plan.plan import StageCall, VariableOutput
from runtime.task.executor import PreparedStage
from runtime.transport.codec import Layout

FetchFrom = Callable[[str, int, int, int], Any]
"""``(task, session, step, slot) -> array``: fetches what another task holds."""


class RegisteredCall:
    """A stage call as a task keeps it: prepared, with its layouts."""

    def __init__(
        self,
        call: StageCall,
        prepared: PreparedStage,
        writes: Mapping[str, int],
    ) -> None:
        self.call = call
        self.handle = 0
        self.digest = b""
        self.origin: tuple[bytes, int, str, bool] = (b"", 0, "", False)
        """What it was registered with: hash of the program, generation, traced, in turn."""
        self.needs_admission = False
        """Whether the session's turn is waited for before it runs."""
        self.writes = dict(writes)
        """By task, the writing stages of the whole step; empty when it has only this one."""
        self.gated = bool(call.stage.writes) and not call.stage.host  # a deferred update passes the gate itself
        self.prepared: PreparedStage | TracedStage = prepared
        self.fetch: FetchFrom | None = None
        """How its remote inputs are fetched when that is to be timed."""
        stage = call.stage
        self.inline = [i for i in range(len(call.inputs)) if i not in call.remote]
        self.dynamic = stage.inputs is None or stage.output_specs is None
        self.input_layout = None if stage.inputs is None else Layout([stage.inputs[i] for i in self.inline])
        self.remember = stage.writes_state or bool(call.remote)
        """Must not run again once it is done: it has written, or has taken what other tasks held for it."""
        self.reads = any(isinstance(o, VariableOutput) and o.index not in stage.writes for o in stage.outputs)
        """Gives somebody the values of variables: what comes back for them is of this age."""
        self.pushes = bool(stage.writes) and bool(call.inputs)
        """Changes variables by what somebody sent; counting a step is no push."""
