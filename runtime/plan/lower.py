"""Lower: the operations of a stage become one program, or a list of host kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.extend
import numpy as np
from jax.extend.core import ClosedJaxpr

from runtime.errors import InvalidArgumentError, one_line
from runtime.expressions.writer import NotInTableError, write_expressions
from runtime.graph.graph import Operation, Tensor
from runtime.graph.op_kinds import (
    Attrs,
    Body,
    Constant,
    Deferred,
    Host,
    Pure,
    Read,
    Update,
    VariableSpec,
    runs_on_host,
)
from runtime.graph.tracing import aval, needs_64_bit, trace
from runtime.plan.draws import draw_alike
from runtime.plan.exporting import own_program, write_program
from runtime.plan.partition import is_write
from runtime.plan.place import Device
from runtime.plan.plan import HostCall, Program, ProgramOutput, Stage, VariableOutput
from runtime.tensor_spec import AnyArray, TensorSpec


@dataclass(frozen=True)
class Traced:
    """The jaxprs of a step's computations and the concrete shape of every tensor whose shape is known."""

    jaxprs: Mapping[Operation, ClosedJaxpr]
    specs: Mapping[Tensor, TensorSpec]
    alias: Mapping[Tensor, Tensor]

    def real(self, tensor: Tensor) -> Tensor:
        """Returns the tensor behind a second name."""
        return self.alias.get(tensor, tensor)


def trace_all(
    operations: Sequence[Operation], feeds: Mapping[Tensor, TensorSpec], alias: Mapping[Tensor, Tensor]
) -> Traced:
    """Traces every operation of a step once, with the concrete shapes of this step's feeds.

    Raises:
        InvalidArgumentError: an operation does not fit these shapes; names the operation.
    """
    specs: dict[Tensor, TensorSpec] = dict(feeds)
    jaxprs: dict[Operation, ClosedJaxpr] = {}
    for op in operations:
        body = op.body
        if isinstance(body, Pure | Update):
            arguments = _arguments(op, specs, alias)
            jaxprs[op] = _trace_one(op, body, arguments)
            results = [TensorSpec.of(a) for a in jaxprs[op].out_avals]
            if isinstance(body, Deferred):  # its outputs are the kernel's
                results += map(static_spec, op.outputs)
            if isinstance(body, Update):
                results = _checked_new_values(op, body, results)
            found = list(zip(op.outputs, results, strict=True))
        elif isinstance(body, Constant):
            found = [(op.outputs[0], TensorSpec.of(body.value))]
        elif isinstance(body, Read):
            found = [(op.outputs[0], TensorSpec.of(body.variable))]
        else:  # a host kernel: what is declared, as far as it is known
            found = [(t, static_spec(t)) for t in op.outputs if t.shape is not None and None not in t.shape]
        for tensor, spec in found:
            specs.setdefault(tensor, spec)  # a fed tensor keeps the shape it was fed with
    return Traced(jaxprs, specs, alias)


def static_spec(tensor: Tensor) -> TensorSpec:
    """Returns the spec of a tensor whose static shape is known as a whole."""
    return TensorSpec(tuple(d for d in tensor.shape or () if d is not None), tensor.dtype)


def _arguments(op: Operation, specs: Mapping[Tensor, TensorSpec], alias: Mapping[Tensor, Tensor]) -> list[TensorSpec]:
    out = []
    for tensor in (alias.get(t, t) for t in op.inputs):
        if tensor not in specs:
            raise InvalidArgumentError(
                f"operation {op.name!r} needs {tensor.name!r}, whose shape is not known before the step runs: "
                "fetch it and feed it to another step, or give it a shape"
            )
        out.append(specs[tensor])
    return out


def _trace_one(op: Operation, body: Pure | Update, inputs: Sequence[TensorSpec]) -> ClosedJaxpr:
    arguments = list(inputs[body.kernel_inputs :] if isinstance(body, Deferred) else inputs)
    if isinstance(body, Update) and not body.overwrites:
        arguments = [*map(TensorSpec.of, body.variables), *arguments]
    outputs = () if isinstance(body, Deferred) else op.outputs
    wide = op.wide or needs_64_bit([s.dtype for s in arguments] + [t.dtype for t in outputs])
    if any(s.dtype == object for s in arguments):
        raise InvalidArgumentError(f"operation {op.name!r}: a string tensor cannot enter a numeric computation")
    try:
        return trace(body.fn, [aval(s.shape, s.dtype) for s in arguments], wide)
    except Exception as error:
        shapes = ", ".join(f"{s.dtype.name}{list(s.shape)}" for s in arguments)
        raise InvalidArgumentError(f"operation {op.name!r}({shapes}): {one_line(error)}") from error


def _checked_new_values(op: Operation, body: Update, results: list[TensorSpec]) -> list[TensorSpec]:
    wanted = len(body.variables) + len(op.outputs)
    if len(results) != wanted:
        raise InvalidArgumentError(
            f"operation {op.name!r} must give {len(body.variables)} new values and {len(op.outputs)} outputs, "
            f"its function gave {len(results)} arrays"
        )
    for variable, new in zip(body.variables, results, strict=False):
        if new.shape != variable.shape or new.dtype != variable.dtype:
            raise InvalidArgumentError(
                f"operation {op.name!r} would change variable {variable.name!r} from {variable.dtype.name}"
                f"{list(variable.shape)} to {new.dtype.name}{list(new.shape)}"
            )
    return results[len(body.variables) :]


def lower_stage(
    device: Device,
    operations: Sequence[Operation],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    traced: Traced,
) -> Stage:
    """Lowers the operations of one stage.

    Args:
        device: where it will run.
        operations: in the order they run; all host operations, or none.
        inputs: tensors that come from outside, constants too large to embed among them.
        outputs: tensors that others need.
        traced: the step's jaxprs and shapes.
    """
    if isinstance(operations[0].body, Deferred):
        return _lower_deferred(device, operations[0], operations[0].body, inputs, outputs, traced)
    lowering = _lower_host if runs_on_host(operations[0].body) else _lower_xla
    return lowering(device, operations, inputs, outputs, traced)


def _lower_host(
    device: Device, operations: Sequence[Operation], inputs: Sequence[Tensor], outputs: Sequence[Tensor], traced: Traced
) -> Stage:
    place = {tensor: i for i, tensor in enumerate(inputs)}
    calls = []
    count = len(inputs)
    for op in operations:
        kernel, attrs = _kernel(op.body)
        arguments = tuple(place[traced.real(t)] for t in op.inputs)
        calls.append(HostCall(kernel, attrs, arguments, len(op.outputs), op.name))
        for tensor in op.outputs:
            place.setdefault(tensor, count)  # a fed tensor keeps its fed value
            count += 1
    return Stage(
        device,
        inputs=None,
        outputs=tuple(ProgramOutput(place[t]) for t in outputs),
        output_specs=None,
        host=tuple(calls),
        writes_state=any(is_write(op) for op in operations),
        operations=tuple(op.name for op in operations),
    )


def _kernel(body: Body) -> tuple[str, Attrs]:
    if isinstance(body, Read):  # of a string variable
        return "read", {"variable": body.variable.name, "container": body.variable.container}
    assert isinstance(body, Host)
    return body.kernel, dict(body.attrs)


def _lower_deferred(
    device: Device, op: Operation, body: Deferred, inputs: Sequence[Tensor], outputs: Sequence[Tensor], traced: Traced
) -> Stage:
    """Lowers a kernel and the update that it may run.

    The stage has both a host call and a program.
    """
    variables, reads, writes = _variables([op])
    own = [traced.real(t) for t in op.inputs[body.kernel_inputs :]]
    place = {tensor: i for i, tensor in enumerate((*inputs, *op.outputs))}
    call = HostCall(
        body.kernel, dict(body.attrs), tuple(place[traced.real(t)] for t in op.inputs), len(op.outputs), op.name
    )
    return Stage(
        device,
        variables,
        reads,
        writes,
        tuple(traced.specs[t] for t in inputs),
        tuple(ProgramOutput(place[t]) for t in outputs),
        tuple(traced.specs[t] for t in outputs),
        _program(device, [op], own, [], traced),
        host=(call,),
        writes_state=True,
        operations=(op.name,),
    )


def _lower_xla(
    device: Device, operations: Sequence[Operation], inputs: Sequence[Tensor], outputs: Sequence[Tensor], traced: Traced
) -> Stage:
    variables, reads, writes = _variables(operations)
    input_specs = tuple(traced.specs[t] for t in inputs)
    if any(s.dtype == object for s in input_specs):
        raise InvalidArgumentError(f"a string tensor cannot enter the computation of {operations[0].name!r}")

    # An output that is just a variable's final value is not computed. Evaluating with tokens in place of arrays shows
    # which outputs are.
    computed, refs = _outputs(operations, outputs, variables)

    program = _program(device, operations, inputs, computed, traced) if writes or computed else None
    specs = tuple(
        TensorSpec.of(variables[r.index]) if isinstance(r, VariableOutput) else traced.specs[t]
        for t, r in zip(outputs, refs, strict=True)
    )
    return Stage(
        device,
        variables,
        reads if program is not None else (),
        writes,
        input_specs,
        refs,
        specs,
        program,
        writes_state=bool(writes),
        operations=tuple(op.name for op in operations),
    )


def _program(
    device: Device,
    operations: Sequence[Operation],
    inputs: Sequence[Tensor],
    computed: Sequence[Tensor],
    traced: Traced,
) -> Program:
    """Makes the program of a stage: from the variables it reads and inputs to those it writes and computed tensors."""
    variables, reads, writes = _variables(operations)

    def run(*arguments: jax.Array) -> tuple[AnyArray, ...]:
        now: dict[VariableSpec, AnyArray] = dict(zip((variables[i] for i in reads), arguments, strict=False))
        values: dict[Tensor, AnyArray] = dict(zip(inputs, arguments[len(reads) :], strict=True))
        draw_alike(operations, traced.jaxprs, traced.specs, values)
        for op in operations:
            _evaluate(op, traced, now, values)
        results = (*(now[variables[i]] for i in writes), *(values[t] for t in computed))
        # Without a computed result, a last one tells when the program is done: variables may be donated meanwhile.
        return results if computed else (*results, np.zeros((), np.bool_))

    arguments = (*(TensorSpec.of(variables[i]) for i in reads), *(traced.specs[t] for t in inputs))
    try:
        make = own_program if device.is_own else write_program
        return make(run, arguments, device.platform)
    except NotInTableError as error:
        names = ", ".join(
            op.name
            for op in operations
            if op in traced.jaxprs and not _can_be_written(traced.jaxprs[op], device.platform)
        )
        raise InvalidArgumentError(
            f"operations [{names}] cannot be sent to {device.name}: {one_line(error)}; "
            "place them on a device of this process"
        ) from error
    # A callback in an operation, or an operation that this platform does not have.
    except Exception as error:
        names = ", ".join(op.name for op in operations)
        raise InvalidArgumentError(
            f"operations [{names}] cannot become a program for {device.name}: {one_line(error)}"
        ) from error


def _can_be_written(jaxpr: ClosedJaxpr, platform: str) -> bool:
    try:
        write_expressions(jaxpr, platform)
    except NotInTableError:
        return False
    return True


def _variables(operations: Sequence[Operation]) -> tuple[tuple[VariableSpec, ...], tuple[int, ...], tuple[int, ...]]:
    """Finds the variables of a stage, those that enter the program, and those that the stage writes."""
    index: dict[VariableSpec, int] = {}
    reads: dict[int, None] = {}
    writes: dict[int, None] = {}
    for op in operations:
        touched = (op.body.variable,) if isinstance(op.body, Read) else getattr(op.body, "variables", ())
        for variable in touched:
            i = index.setdefault(variable, len(index))
            overwrites = isinstance(op.body, Update) and op.body.overwrites
            if not overwrites and i not in writes:
                reads[i] = None
            if isinstance(op.body, Update):
                writes[i] = None
    return tuple(index), tuple(reads), tuple(writes)


def _outputs(
    operations: Sequence[Operation], outputs: Sequence[Tensor], variables: Sequence[VariableSpec]
) -> tuple[list[Tensor], tuple[VariableOutput | ProgramOutput, ...]]:
    """Tells outputs that are a variable's final value (sent by reference) from those that are computed."""
    versions = dict.fromkeys(variables, 0)
    same_as: dict[Tensor, tuple[VariableSpec, int]] = {}
    for op in operations:
        if isinstance(op.body, Read):
            same_as[op.outputs[0]] = (op.body.variable, versions[op.body.variable])
        elif isinstance(op.body, Update):
            for variable in op.body.variables:
                versions[variable] += 1
            if op.type in _GIVES_NEW_VALUE and len(op.body.variables) == 1 and op.outputs:
                same_as[op.outputs[0]] = (op.body.variables[0], versions[op.body.variables[0]])
    final = {(v, n): i for i, (v, n) in enumerate(versions.items())}
    computed: list[Tensor] = []
    refs: list[VariableOutput | ProgramOutput] = []
    for tensor in outputs:
        index = final.get(same_as[tensor]) if tensor in same_as else None
        if index is not None:
            refs.append(VariableOutput(index))
        else:
            refs.append(ProgramOutput(len(computed)))
            computed.append(tensor)
    return computed, tuple(refs)


_GIVES_NEW_VALUE = frozenset({"Assign", "AssignAdd", "AssignSub"})


def _evaluate(op: Operation, traced: Traced, now: dict[VariableSpec, AnyArray], values: dict[Tensor, AnyArray]) -> None:
    """Runs one operation on tracers: ``now`` holds the variables as of this point of the stage."""
    body = op.body
    results: Sequence[AnyArray]
    if isinstance(body, Read):
        results = [now[body.variable]]
    elif isinstance(body, Constant):
        results = [body.value]
    elif isinstance(body, Pure):
        if values.keys() >= {*op.outputs}:
            return  # drawn with others, or fed
        results = _apply(traced.jaxprs[op], [values[traced.real(t)] for t in op.inputs])
    else:
        assert isinstance(body, Update)
        old = [] if body.overwrites else [now[v] for v in body.variables]
        given = op.inputs[body.kernel_inputs :] if isinstance(body, Deferred) else op.inputs
        everything = _apply(traced.jaxprs[op], [*old, *(values[traced.real(t)] for t in given)])
        now.update(zip(body.variables, everything, strict=False))
        if isinstance(body, Deferred):
            return  # its outputs are the kernel's
        results = everything[len(body.variables) :]
    for tensor, value in zip(op.outputs, results, strict=True):
        values.setdefault(tensor, value)  # a fed tensor keeps its fed value


def _apply(jaxpr: ClosedJaxpr, arguments: Sequence[AnyArray]) -> Sequence[AnyArray]:
    results: Sequence[AnyArray] = jax.extend.core.jaxpr_as_fun(jaxpr)(*arguments)
    return results
