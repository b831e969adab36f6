"""Checks that the parts of a stage call, or of a plan, fit together, before anything of it is compiled."""

from collections.abc import Collection, Iterable, Sequence

from runtime.errors import InvalidArgumentError
from runtime.plan.plan import Plan, Program, ProgramOutput, Stage, StageCall, VariableOutput
from runtime.tensor_spec import TensorSpec

NAME = 1 << 10
"""Characters of the longest name of an operation, a variable or a container."""


def check_call(call: StageCall, task: str) -> None:
    """Checks that every index of a stage call refers to something, and that the program fits the stage.

    `runtime.task.compiler` checks later that the program computes what the program declares.

    Args:
        call: The stage call.
        task: Name of the task, for errors.

    Raises:
        InvalidArgumentError: Two parts do not fit together. The error names the parts.
    """
    stage = call.stage
    try:
        _check_names(stage)
        _check_variables(stage)
        available = len(call.inputs)
        if stage.inputs is not None:
            _equal("inputs", available, len(stage.inputs))
        if stage.host:
            available = _check_kernels(stage, available)
        if stage.program is not None:
            _check_program(stage, stage.program)
        elif stage.reads or stage.writes:
            raise InvalidArgumentError("variables are read or written by no program")
        if stage.host:
            _check_outputs(stage, available)
        else:
            _check_outputs(
                stage,
                0 if stage.program is None else len(stage.program.results) - len(stage.writes),
            )
        _equal("outputs", len(call.outputs), len(stage.outputs))
        _within("remote inputs", call.remote, len(call.inputs))
        _within("held outputs", call.holds, len(stage.outputs))
        _within("replies", call.replies, len(stage.outputs))
    except InvalidArgumentError as error:
        names = ", ".join(stage.operations[:5])
        raise InvalidArgumentError(
            f"the stage of [{names}] does not fit together: {error.message}", task=task
        ) from None


def check_plan(plan: Plan) -> None:
    """Checks that every number of a stage or a slot in a plan refers to something that comes before.

    Raises:
        InvalidArgumentError: Two parts contradict each other. The error names the parts.
    """
    _within("feeds and constants", [plan.feeds, plan.step_id_slot], plan.slots)
    if len(plan.after) != len(plan.stages):
        raise InvalidArgumentError(f"after: {len(plan.after)} for {len(plan.stages)} stages")
    filled = {*range(plan.step_id_slot + 1)}
    for number, (call, before) in enumerate(zip(plan.stages, plan.after, strict=True)):
        _within(f"after of stage {number}", before, number)
        _among(f"inputs of stage {number}", call.inputs, filled)
        filled.update(call.outputs)
    _within("outputs", filled, plan.slots)
    _among("fetches", plan.fetches, {-1, *filled})


def _check_names(stage: Stage) -> None:
    # Errors and logs repeat these names, and another process has chosen them.
    names = [*stage.operations, *(host.op for host in stage.host)]
    names += [name for variable in stage.variables for name in (variable.container, variable.name)]
    if (longest := max(map(len, names), default=0)) > NAME:
        raise InvalidArgumentError(f"a name of {longest:,} characters, {NAME:,} are allowed")


def _check_variables(stage: Stage) -> None:
    seen: set[tuple[str, str]] = set()
    for variable in stage.variables:
        key = (variable.container, variable.name)
        if key in seen:
            raise InvalidArgumentError(f"variable {variable.name!r} comes twice")
        seen.add(key)
    for what, indices in (("variables read", stage.reads), ("variables written", stage.writes)):
        _within(what, indices, len(stage.variables))
        if len(set(indices)) < len(indices):
            raise InvalidArgumentError(f"{what}: {list(indices)} has one twice")
    # The reply of a call that does not say so is not kept, and a repeated call would write twice.
    if stage.writes and not stage.writes_state:
        raise InvalidArgumentError("it writes variables and does not say so")


def _check_kernels(stage: Stage, available: int) -> int:
    """Checks the kernels' arguments; returns the number of values after the last kernel."""
    if stage.program is not None and len(stage.host) != 1:
        raise InvalidArgumentError(f"an update is deferred by one kernel, not by {len(stage.host)}")
    for call in stage.host:
        _within(f"arguments of {call.kernel}", call.arguments, available)
        # A negative number would move the indices of all later values.
        if call.results < 0:
            raise InvalidArgumentError(f"{call.kernel} gives {call.results} results")
        available += call.results
    return available


def _check_program(stage: Stage, program: Program) -> None:
    variables = [TensorSpec(v.shape, v.dtype) for v in stage.variables]
    _same(
        "variables read", program.arguments[: len(stage.reads)], [variables[i] for i in stage.reads]
    )
    _same(
        "variables written",
        program.results[: len(stage.writes)],
        [variables[i] for i in stage.writes],
    )
    if len(program.results) <= len(stage.writes):
        raise InvalidArgumentError(
            "the program has no result beside the variables, which would tell when it is done"
        )
    # The kernel of a deferred update makes the inputs of the program, so the stage cannot declare
    # them.
    if not stage.host:
        _same("inputs", program.arguments[len(stage.reads) :], stage.inputs)


def _check_outputs(stage: Stage, computed: int) -> None:
    """Checks the outputs, of which ``computed`` values are not variables."""
    specs = stage.output_specs
    if specs is not None:
        _equal("outputs", len(specs), len(stage.outputs))
    for i, output in enumerate(stage.outputs):
        if isinstance(output, VariableOutput):
            _within("outputs", [output.index], len(stage.variables))
            variable = stage.variables[output.index]
            made: TensorSpec | None = TensorSpec(variable.shape, variable.dtype)
        else:
            assert isinstance(output, ProgramOutput)
            _within("outputs", [output.index], computed)
            # The results of kernels have no declared types, so only a program's are compared.
            program = None if stage.host else stage.program
            made = None if program is None else program.results[len(stage.writes) + output.index]
        if specs is not None and made is not None:
            _same("outputs", [made], [specs[i]])


def _within(what: str, indices: Iterable[int], count: int) -> None:
    _among(what, indices, range(count))


def _among(what: str, indices: Iterable[int], known: Collection[int]) -> None:
    for index in indices:
        if index not in known:
            raise InvalidArgumentError(f"{what}: there is no number {index} among {len(known)}")


def _equal(what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise InvalidArgumentError(f"{found} {what} where the stage has {wanted}")


def _same(what: str, found: Sequence[TensorSpec], wanted: Sequence[TensorSpec] | None) -> None:
    if wanted is None or list(found) != list(wanted):
        shown = "of any kind" if wanted is None else ", ".join(map(str, wanted)) or "none"
        raise InvalidArgumentError(
            f"{what}: the program has {', '.join(map(str, found)) or 'none'}, the stage {shown}"
        )
