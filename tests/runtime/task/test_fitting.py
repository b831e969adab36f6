"""A peer's stage whose parts do not fit together is refused when it is registered."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import runtime as rt
from runtime.graph.op_kinds import VariableSpec
from runtime.plan.exporting import own_program
from runtime.plan.place import Device
from runtime.plan.plan import (
    HeldOutput,
    HostCall,
    Program,
    ProgramOutput,
    RemoteInput,
    Stage,
    StageCall,
    VariableOutput,
)
from runtime.task.worker import Worker
from runtime.tensor_spec import TensorSpec

F32, I32 = np.dtype(np.float32), np.dtype(np.int32)
VECTOR, SCALAR = TensorSpec((3,), F32), TensorSpec((), F32)
W, V = VariableSpec("w", (3,), F32), VariableSpec("v", (3,), F32)


def program(fn: Any = lambda w, x: (w + x, x.sum()), arguments: Any = (VECTOR, VECTOR)) -> Program:
    return own_program(fn, arguments, "cpu")


def call(**parts: Any) -> StageCall:
    """w += x; gives w and the sum of x. ``parts`` of the stage or of the call are replaced."""
    stage = Stage(
        device=Device("ps", 0, "CPU", 0, "cpu"),
        variables=(W, V),
        reads=(0,),
        writes=(0,),
        inputs=(VECTOR,),
        outputs=(VariableOutput(0), ProgramOutput(0)),
        output_specs=(VECTOR, SCALAR),
        program=program(),
        writes_state=True,
        operations=("train",),
    )
    of_stage = {f.name for f in dataclasses.fields(Stage)}
    stage = dataclasses.replace(stage, **{k: v for k, v in parts.items() if k in of_stage})
    made = StageCall(stage, 0, (0,), (1, 2), replies=(0, 1))
    return dataclasses.replace(
        made, **{k.removeprefix("call_"): v for k, v in parts.items() if k.startswith("call_")}
    )


def host(**parts: Any) -> StageCall:
    kernel = HostCall("identity", {}, (0,), 1)
    whole: dict[str, Any] = {
        "variables": (),
        "reads": (),
        "writes": (),
        "inputs": None,
        "output_specs": None,
        "outputs": (ProgramOutput(1),),
        "program": None,
        "host": (kernel,),
        "call_outputs": (1,),
        "call_replies": (0,),
    }
    return call(**(whole | parts))


@pytest.fixture
def worker() -> Worker:
    def nothing(task: str, session: int, step: int, slot: int) -> Any:
        raise rt.NotFoundError("nothing is held")

    return Worker("ps", 0, nothing)


def test_fitting_stage_is_registered(worker: Worker) -> None:
    """A stage that fits its program is registered."""
    assert worker.registrar.register(call()) is not None
    assert worker.registrar.register(host()) is not None


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (
            lambda: call(program=program(lambda w, x: (w[:2], x.sum()))),
            "variables written: the program has float32",
        ),
        (
            lambda: call(program=program(lambda w, x: (w.astype(I32), x.sum()))),
            "variables written: .* int32",
        ),
        (
            lambda: call(program=program(arguments=(TensorSpec((1,), F32), VECTOR))),
            "variables read: .*float32",
        ),
        (
            lambda: call(program=program(arguments=(VECTOR, TensorSpec((1,), F32)))),
            "inputs: the program has",
        ),
        (
            lambda: call(program=program(lambda w: (w, w.sum()), (VECTOR,))),
            "inputs: the program has none",
        ),
        (lambda: call(program=program(lambda w, x: (w + x,))), "no result beside the variables"),
        (lambda: call(program=None), "by no program"),
        (lambda: call(inputs=None), "inputs: the program has .* of any kind"),
        (lambda: call(inputs=()), "1 inputs where the stage has 0"),
        (lambda: call(reads=(7,)), "variables read: there is no number 7 among 2"),
        (lambda: call(reads=(-1,)), "variables read: there is no number -1 among 2"),
        (lambda: call(writes=(2,)), "variables written: there is no number 2 among 2"),
        (lambda: call(writes=(0, 0)), "has one twice"),
        (lambda: call(variables=(W, W)), "'w' comes twice"),
        (lambda: call(variables=(VariableSpec("w", (5,), F32), V)), "variables read"),
        (lambda: call(writes_state=False), "does not say so"),
        (
            lambda: call(outputs=(VariableOutput(2), ProgramOutput(0))),
            "outputs: there is no number 2 among 2",
        ),
        (
            lambda: call(outputs=(VariableOutput(0), ProgramOutput(1))),
            "outputs: there is no number 1 among 1",
        ),
        (lambda: call(output_specs=(VECTOR, VECTOR)), "outputs: the program has"),
        (lambda: call(output_specs=(SCALAR, SCALAR)), "outputs: the program has"),
        (lambda: call(output_specs=(VECTOR,)), "1 outputs where the stage has 2"),
        (lambda: call(call_outputs=(1,)), "1 outputs where the stage has 2"),
        (lambda: call(call_inputs=(0, 1)), "2 inputs where the stage has 1"),
        (lambda: call(call_replies=(2,)), "replies: there is no number 2 among 2"),
        (lambda: call(call_holds={5: HeldOutput(1)}), "held outputs: there is no number 5 among 2"),
        (
            lambda: call(call_remote={1: RemoteInput("/job:ps/task:1", 0)}),
            "remote inputs: there is no number 1 among 1",
        ),
        (
            lambda: host(host=(HostCall("identity", {}, (1,), 1),)),
            "of identity: there is no number 1 among 1",
        ),
        (lambda: host(host=(HostCall("identity", {}, (0,), -1),)), "gives -1 results"),
        (lambda: host(outputs=(ProgramOutput(2),)), "outputs: there is no number 2 among 2"),
        (
            lambda: call(host=(HostCall("print", {}, (), 0), HostCall("print", {}, (), 0))),
            "by one kernel, not by 2",
        ),
    ],
)
def test_misfit_is_refused(worker: Worker, wrong: Any, what: str) -> None:
    """A stage that does not fit its program is refused with the reason, and makes no variable."""
    with pytest.raises(rt.InvalidArgumentError, match=what):
        worker.registrar.register(wrong())
    assert worker.store.variables() == []
