"""Lowering: the operations of a stage become one program, or a list of host kernels."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend
import numpy as np
from jax.extend.core import ClosedJaxpr

from runtime.errors import InvalidArgumentError, one_line
from runtime.expressions.writer import NotInTableError, write_expressions
from runtime.graph.gradients import Backward
from runtime.graph.graph import Operation, Tensor
from runtime.graph.mesh import shard_input
from runtime.graph.op_kinds import (
    ArrayFn,
    Attrs,
    Body,
    Constant,
    Deferred,
    Host,
    HostProgram,
    Pure,
    Read,
    Update,
    VariableSpec,
    runs_on_host,
)
from runtime.graph.tracing import aval, needs_64_bit, resize, trace
from runtime.plan.draws import describe_jaxpr, draw_alike
from runtime.plan.exporting import calls_python, own_program, write_program
from runtime.plan.packing import Pack, Value, cut_packs, join_packs
from runtime.plan.partition import is_write
from runtime.plan.place import Device
from runtime.plan.plan import HostCall, Program, ProgramOutput, Stage, VariableOutput
from runtime.tensor_spec import AnyArray, TensorSpec

_RETURN_NEW_VALUE = frozenset({"Assign", "AssignAdd", "AssignSub"})
"""Types of the updates whose output is the new value of the variable."""
Apply: TypeAlias = Callable[[ClosedJaxpr, Sequence[AnyArray]], Sequence[AnyArray]]
"""A way to call a jaxpr."""


@dataclass(frozen=True)
class TracedStep:
    """The jaxprs of a step's computations and the concrete shape of every tensor whose shape is known.

    Shapes that are rare are not worth a compilation yet.
    """

    jaxprs: Mapping[Operation, ClosedJaxpr]
    specs: Mapping[Tensor, TensorSpec]
    alias: Mapping[Tensor, Tensor]
    is_rare: bool

    def real(self, tensor: Tensor) -> Tensor:
        """Returns the tensor behind a second name."""
        return self.alias.get(tensor, tensor)

    def spec_of(self, value: Value) -> TensorSpec:
        """Returns the shape and dtype of an input or an output of a stage."""
        return value.spec if isinstance(value, Pack) else self.specs[value]


@dataclass(frozen=True)
class StageSource:
    """A stage before lowering.

    Attributes:
        device: the device of the stage.
        operations: in the order in which the operations run. All or none are host operations.
        inputs: tensors from outside, constants too large to embed among them.
        outputs: tensors for other stages and for the client.
        traced: the step's jaxprs and shapes.
    """

    device: Device
    operations: Sequence[Operation]
    inputs: Sequence[Value]
    outputs: Sequence[Value]
    traced: TracedStep


class _VariableAccesses(NamedTuple):
    """The variables of a stage.

    Attributes:
        variables: the variables that the stage touches.
        reads: indices of the variables that enter the program.
        writes: indices of the variables that the stage writes.
    """

    variables: tuple[VariableSpec, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]


class _GradientKey(NamedTuple):
    """The description of a gradient. JAX derives gradients of equal descriptions once.

    Attributes:
        forward: the description of the forward function's jaxpr.
        needed: places of the inputs whose cotangents are returned.
        used: places of the outputs whose cotangents are given.
        wide: True for a trace in 64-bit mode.
        arguments: shape and dtype of each argument.
    """

    forward: Hashable
    needed: tuple[int, ...]
    used: tuple[int, ...]
    wide: bool
    arguments: tuple[TensorSpec, ...]


class SizelessStep(NamedTuple):
    """A step that was traced with symbols for the sizes of its feeds.

    Attributes:
        jaxprs: the jaxprs with symbols.
        sizes: the number of this step for each symbol.
    """

    jaxprs: Mapping[Operation, ClosedJaxpr]
    sizes: Mapping[Any, int]

    def find_gradient(self, op: Operation, key: _GradientKey) -> ClosedJaxpr | None:
        """Returns the jaxpr of a gradient for the sizes of this step; None if JAX must derive the gradient.

        The derivative of a jaxpr with symbols holds for all sizes. But a function may depend on a
        size in any way. So the forward function was traced for the sizes of this step, and its
        jaxpr must be the one with symbols.
        """
        fn = getattr(op.body, "fn", None)
        assert isinstance(fn, Backward), "only a gradient has a key"
        if not {op, fn.forward} <= self.jaxprs.keys():
            return None
        try:
            if describe_jaxpr(resize(self.jaxprs[fn.forward], self.sizes)) == key.forward:
                return resize(self.jaxprs[op], self.sizes)
        # A function computes with a size, such as the number of elements.
        except KeyError:
            pass
        return None


def trace_all(
    operations: Sequence[Operation],
    feeds: Mapping[Tensor, TensorSpec],
    alias: Mapping[Tensor, Tensor],
    sizeless: SizelessStep | None = None,
) -> TracedStep:
    """Traces every operation of a step once, with the concrete shapes of this step's feeds.

    Args:
        operations: in the order in which the operations run.
        feeds: the fed tensors with their shapes.
        alias: second names of tensors.
        sizeless: a trace of the step for rare shapes.

    Raises:
        InvalidArgumentError: an operation does not fit these shapes. The message names the
            operation.
    """
    specs: dict[Tensor, TensorSpec] = dict(feeds)
    jaxprs: dict[Operation, ClosedJaxpr] = {}
    gradients: dict[_GradientKey | None, ClosedJaxpr] = {}
    for op in operations:
        body = op.body
        if isinstance(body, Pure | Update):
            arguments = _find_arguments(op, specs, alias)
            # JAX takes longer to derive a gradient than to trace its function, and the gradients of
            # equal functions are equal.
            key = _describe_gradient(op, jaxprs, arguments)
            found_before = key and _find_gradient(op, key, gradients, sizeless)
            jaxprs[op] = found_before or _trace_one(op, body, arguments)
            gradients[key] = jaxprs[op]
        # A fed tensor keeps the shape of the fed value.
        given = [specs.get(alias.get(t, t)) for t in op.inputs]
        for tensor, spec in _describe_outputs(op, jaxprs.get(op), given):
            specs.setdefault(tensor, spec)
    return TracedStep(jaxprs, specs, alias, sizeless is not None)


def _describe_outputs(
    op: Operation, jaxpr: ClosedJaxpr | None, given: Sequence[TensorSpec | None]
) -> Sequence[tuple[Tensor, TensorSpec]]:
    """Returns the outputs of an operation with their specs; without those that only the step knows.

    Args:
        op: the operation.
        jaxpr: its jaxpr, if it has one.
        given: specs of its inputs; None for an input of which only the step knows the shape.
    """
    body = op.body
    if jaxpr is not None:
        results = [TensorSpec.of(a) for a in jaxpr.out_avals]
        # The outputs of a deferred update are the kernel's.
        if isinstance(body, Deferred):
            results += map(static_spec, op.outputs)
        if isinstance(body, Update):
            results = _check_new_values(op, body, results)
        return list(zip(op.outputs, results, strict=True))
    if isinstance(body, Constant):
        return [(op.outputs[0], TensorSpec.of(body.value))]
    if isinstance(body, Read):
        return [(op.outputs[0], TensorSpec.of(body.variable))]
    return _describe_kernel(op, given)


def _describe_kernel(
    op: Operation, given: Sequence[TensorSpec | None]
) -> Sequence[tuple[Tensor, TensorSpec]]:
    """Returns the outputs of a host kernel whose shapes are declared, or follow from those of the inputs."""
    shapes = [t.shape for t in op.outputs]
    if isinstance(op.body, Host) and op.body.find_shapes is not None:
        shapes = list(op.body.find_shapes([None if s is None else s.shape for s in given]))
    assert len(shapes) == len(op.outputs), "each output has a shape"
    return [
        (tensor, TensorSpec(tuple(d for d in shape if d is not None), tensor.dtype))
        for tensor, shape in zip(op.outputs, shapes, strict=True)
        if shape is not None and None not in shape
    ]


def trace_sizeless(
    operations: Sequence[Operation],
    feeds: Mapping[Tensor, jax.ShapeDtypeStruct],
    traced: TracedStep,
) -> Mapping[Operation, ClosedJaxpr]:
    """Traces the pure operations behind the feeds with symbols for sizes.

    An operation that JAX cannot trace so is left out.

    Args:
        operations: in the order in which the operations run.
        feeds: the fed tensors with symbols.
        traced: the step with numbers.
    """
    avals: dict[Tensor, Any] = dict(feeds)
    jaxprs: dict[Operation, ClosedJaxpr] = {}
    for op in operations:
        inputs = [traced.real(t) for t in op.inputs]
        if isinstance(op.body, Pure) and avals.keys() & inputs:
            given = [avals.get(t, traced.specs[t]) for t in inputs]
            try:
                jaxprs[op] = _trace_one(op, op.body, given)
            except InvalidArgumentError:
                continue
            for tensor, found in zip(op.outputs, jaxprs[op].out_avals, strict=True):
                avals.setdefault(tensor, found)
    return jaxprs


def _find_gradient(
    op: Operation,
    key: _GradientKey,
    gradients: Mapping[_GradientKey | None, ClosedJaxpr],
    sizeless: SizelessStep | None,
) -> ClosedJaxpr | None:
    """Finds the jaxpr of a gradient among those of this step, and then among those with symbols."""
    known = gradients.get(key)
    return sizeless.find_gradient(op, key) if known is None and sizeless is not None else known


def _describe_gradient(
    op: Operation, jaxprs: Mapping[Operation, ClosedJaxpr], arguments: Sequence[TensorSpec]
) -> _GradientKey | None:
    """Describes a gradient by the jaxpr of its forward function; None for any other operation."""
    fn = getattr(op.body, "fn", None)
    if not isinstance(fn, Backward) or fn.forward not in jaxprs:
        return None
    form = describe_jaxpr(jaxprs[fn.forward])
    if form is None:
        return None
    return _GradientKey(form, fn.needed, fn.used, op.wide, tuple(arguments))


def static_spec(tensor: Tensor) -> TensorSpec:
    """Returns the spec of a tensor whose static shape is known as a whole."""
    return TensorSpec(tuple(d for d in tensor.shape or () if d is not None), tensor.dtype)


def _find_arguments(
    op: Operation, specs: Mapping[Tensor, TensorSpec], alias: Mapping[Tensor, Tensor]
) -> list[TensorSpec]:
    out = []
    for tensor in (alias.get(t, t) for t in op.inputs):
        if tensor not in specs:
            raise InvalidArgumentError(
                f"operation {op.name!r} needs {tensor.name!r}, whose shape is not known before "
                "the step runs: fetch it and feed it to another step, or give it a shape"
            )
        out.append(specs[tensor])
    return out


def _trace_one(op: Operation, body: Pure | Update, inputs: Sequence[TensorSpec]) -> ClosedJaxpr:
    arguments = list(inputs[body.kernel_inputs :] if isinstance(body, Deferred) else inputs)
    if isinstance(body, Update) and not body.overwrites:
        arguments = [*map(TensorSpec.of, body.variables), *arguments]
    outputs = () if isinstance(body, Deferred) else op.outputs
    # Each operation has its own mode: a 64-bit array of one operation must not widen another
    # operation.
    wide = op.wide or needs_64_bit([s.dtype for s in arguments] + [t.dtype for t in outputs])
    if any(s.dtype == object for s in arguments):
        raise InvalidArgumentError(
            f"operation {op.name!r}: a string tensor cannot enter a numeric computation"
        )
    try:
        return trace(body.fn, [aval(s.shape, s.dtype) for s in arguments], wide)
    except Exception as error:
        shapes = ", ".join(f"{s.dtype.name}{list(s.shape)}" for s in arguments)
        raise InvalidArgumentError(f"operation {op.name!r}({shapes}): {one_line(error)}") from error


def _check_new_values(op: Operation, body: Update, results: list[TensorSpec]) -> list[TensorSpec]:
    """Checks the new values of the variables, and returns the results behind the new values."""
    wanted = len(body.variables) + len(op.outputs)
    if len(results) != wanted:
        raise InvalidArgumentError(
            f"operation {op.name!r} must give {len(body.variables)} new values and "
            f"{len(op.outputs)} outputs, its function gave {len(results)} arrays"
        )
    # A task allocates a variable once, so a step cannot change its shape or dtype.
    for variable, new in zip(body.variables, results, strict=False):
        if new.shape != variable.shape or new.dtype != variable.dtype:
            raise InvalidArgumentError(
                f"operation {op.name!r} would change variable {variable.name!r} from "
                f"{variable.dtype.name}{list(variable.shape)} to {new.dtype.name}{list(new.shape)}"
            )
    return results[len(body.variables) :]


def lower_stage(source: StageSource) -> Stage:
    """Lowers the operations of one stage.

    Raises:
        InvalidArgumentError: the operations cannot become a program for the device. The message
            names the operations.
    """
    first = source.operations[0]
    if isinstance(first.body, Deferred):
        return _lower_deferred(source, first, first.body)
    if isinstance(first.body, HostProgram):
        assert len(source.operations) == 1, "a kernel with a program shares its stage"
        return replace(_lower_host(source), program=_make_kernel_program(source, first, first.body))
    return _lower_host(source) if runs_on_host(first.body) else _lower_xla(source)


def _make_kernel_program(source: StageSource, op: Operation, body: HostProgram) -> Program:
    """Makes the program that a kernel runs on arrays of its own."""
    arguments, device = tuple(body.arguments), source.device
    avals = [aval(s.shape, s.dtype) for s in arguments]
    jaxpr = trace(body.fn, avals, op.wide or needs_64_bit([s.dtype for s in arguments]))
    run: ArrayFn = jax.extend.core.jaxpr_as_fun(jaxpr)
    try:
        if device.is_own:
            return own_program(run, arguments, device.platform)
        return write_program(run, arguments, device.platform)
    except NotInTableError as error:
        raise InvalidArgumentError(
            f"operation {op.name!r} cannot be sent to {device.name}: {one_line(error)}"
        ) from error


def _lower_host(source: StageSource) -> Stage:
    place = {tensor: i for i, tensor in enumerate(source.inputs)}
    calls = []
    count = len(place)
    for op in source.operations:
        kernel, attrs = _find_kernel(op.body)
        arguments = tuple(place[source.traced.real(t)] for t in op.inputs)
        calls.append(HostCall(kernel, attrs, arguments, len(op.outputs), op.name))
        # A fed tensor keeps its fed value. The kernel's result still counts.
        for tensor in op.outputs:
            place.setdefault(tensor, count)
            count += 1
    return Stage(
        source.device,
        inputs=None,
        outputs=tuple(ProgramOutput(place[t]) for t in source.outputs),
        output_specs=None,
        host=tuple(calls),
        writes_state=any(map(is_write, source.operations)),
        operations=tuple(op.name for op in source.operations),
    )


def _find_kernel(body: Body) -> tuple[str, Attrs]:
    # Reads of string variables run on the host, reads of numbers do not.
    if isinstance(body, Read):
        return "read", {"variable": body.variable.name, "container": body.variable.container}
    assert isinstance(body, Host)
    return body.kernel, dict(body.attrs)


def _lower_deferred(source: StageSource, op: Operation, body: Deferred) -> Stage:
    """Lowers a kernel and the update that the kernel may run.

    The stage has both a host call and a program.
    """
    assert len(source.operations) == 1, "a deferred update shares its stage with no operation"
    accesses, traced = _find_accesses([op]), source.traced
    place = {value: i for i, value in enumerate((*source.inputs, *op.outputs))}
    arguments = [traced.real(t) for t in op.inputs]
    call = HostCall(
        body.kernel, dict(body.attrs), tuple(place[t] for t in arguments), len(op.outputs), op.name
    )
    return Stage(
        source.device,
        *accesses,
        tuple(map(traced.spec_of, source.inputs)),
        tuple(ProgramOutput(place[t]) for t in source.outputs),
        tuple(map(traced.spec_of, source.outputs)),
        _make_program(source, accesses, arguments[body.kernel_inputs :], []),
        host=(call,),
        writes_state=True,
        operations=(op.name,),
    )


def _lower_xla(source: StageSource) -> Stage:
    operations, traced = source.operations, source.traced
    input_specs = tuple(map(traced.spec_of, source.inputs))
    if any(s.dtype == object for s in input_specs):
        raise InvalidArgumentError(
            f"a string tensor cannot enter the computation of {operations[0].name!r}"
        )
    accesses = variables, reads, writes = _find_accesses(operations)
    computed, refs = _find_outputs(source, variables)
    # A stage that only hands out variables has no program, and reads no variable into a program.
    program = (
        _make_program(source, accesses, source.inputs, computed) if writes or computed else None
    )
    specs = tuple(
        TensorSpec.of(variables[r.index]) if isinstance(r, VariableOutput) else traced.spec_of(t)
        for t, r in zip(source.outputs, refs, strict=True)
    )
    return Stage(
        source.device,
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


def _make_program(
    source: StageSource,
    accesses: _VariableAccesses,
    inputs: Sequence[Value],
    computed: Sequence[Value],
) -> Program:
    """Makes the program of a stage: ``(variables read, inputs) -> (variables written, computed tensors)``."""
    device, operations, traced = source.device, source.operations, source.traced
    variables, reads, writes = accesses
    mesh = device.mesh
    shardings = mesh and tuple(shard_input(mesh, t, traced.spec_of(t).shape) for t in inputs)

    def run_operations(*arguments: jax.Array, apply: Apply = _apply_jaxpr) -> tuple[AnyArray, ...]:
        if shardings:
            arguments = jax.lax.with_sharding_constraint(arguments, shardings)
        now: dict[VariableSpec, AnyArray] = dict(
            zip((variables[i] for i in reads), arguments, strict=False)
        )
        values = cut_packs(inputs, arguments[len(reads) :])
        draw_alike(operations, traced.jaxprs, traced.specs, values)
        for op in operations:
            _evaluate_operation(op, traced, now, values, apply)
        results = (*(now[variables[i]] for i in writes), *join_packs(computed, values))
        # Each program has a result that shows when the program is done. A written variable does not
        # show the end: the next program may have taken over its memory.
        return results if computed else (*results, np.zeros((), np.bool_))

    arguments = (*(TensorSpec.of(variables[i]) for i in reads), *map(traced.spec_of, inputs))
    try:
        if device.is_own:
            return own_program(run_operations, arguments, device.platform, traced.is_rare, mesh)
        return write_program(run_operations, arguments, device.platform)
    # The writer names no operation of the graph, so each operation is tried alone.
    except NotInTableError as error:
        bad = [op for op in operations if not _can_be_written(traced.jaxprs.get(op), device)]
        raise InvalidArgumentError(
            f"operations [{_join_names(bad)}] cannot be sent to {device.name}: {one_line(error)}; "
            "place them on a device of this process"
        ) from error
    # A callback in an operation, or an operation that this platform does not have.
    except Exception as error:
        guilty = list(filter(lambda op: calls_python(traced.jaxprs.get(op)), operations))
        raise InvalidArgumentError(
            f"operations [{_join_names(guilty or operations)}] cannot become a program for {device.name}: "
            f"{one_line(error)}"
        ) from error


def _join_names(operations: Sequence[Operation]) -> str:
    return ", ".join(op.name for op in operations)


def _can_be_written(jaxpr: ClosedJaxpr | None, device: Device) -> bool:
    try:
        if jaxpr is not None:
            write_expressions(jaxpr, device.platform)
    except NotInTableError:
        return False
    return True


def _find_accesses(operations: Sequence[Operation]) -> _VariableAccesses:
    index: dict[VariableSpec, int] = {}
    reads: dict[int, None] = {}
    writes: dict[int, None] = {}
    for op in operations:
        touched = (
            (op.body.variable,) if isinstance(op.body, Read) else getattr(op.body, "variables", ())
        )
        for variable in touched:
            i = index.setdefault(variable, len(index))
            overwrites = isinstance(op.body, Update) and op.body.overwrites
            # A value that the stage itself has written does not enter the program.
            if not overwrites and i not in writes:
                reads[i] = None
            if isinstance(op.body, Update):
                writes[i] = None
    return _VariableAccesses(tuple(index), tuple(reads), tuple(writes))


def _find_outputs(
    source: StageSource, variables: Sequence[VariableSpec]
) -> tuple[list[Value], tuple[VariableOutput | ProgramOutput, ...]]:
    """Separates outputs that are a variable's final value from outputs that the program computes.

    A final value is sent by reference.

    Returns:
        The computed tensors, and the source of each output.
    """
    # The versions of a variable are counted in the order of the stage: an output with the last
    # version is final.
    versions = dict.fromkeys(variables, 0)
    same_as: dict[Value, tuple[VariableSpec, int]] = {}
    for op in source.operations:
        if isinstance(op.body, Read):
            same_as[op.outputs[0]] = (op.body.variable, versions[op.body.variable])
        elif isinstance(op.body, Update):
            for variable in op.body.variables:
                versions[variable] += 1
            if op.type in _RETURN_NEW_VALUE and len(op.body.variables) == 1 and op.outputs:
                same_as[op.outputs[0]] = (op.body.variables[0], versions[op.body.variables[0]])
    final = {(v, n): i for i, (v, n) in enumerate(versions.items())}
    computed: list[Value] = []
    refs: list[VariableOutput | ProgramOutput] = []
    for tensor in source.outputs:
        index = final.get(same_as[tensor]) if tensor in same_as else None
        if index is not None:
            refs.append(VariableOutput(index))
        else:
            refs.append(ProgramOutput(len(computed)))
            computed.append(tensor)
    return computed, tuple(refs)


def _evaluate_operation(
    op: Operation,
    traced: TracedStep,
    now: dict[VariableSpec, AnyArray],
    values: dict[Value, AnyArray],
    apply: Apply,
) -> None:
    """Runs one operation on tracers: ``now`` holds the variables as of this point of the stage."""
    body = op.body
    results: Sequence[AnyArray]
    if isinstance(body, Read):
        results = [now[body.variable]]
    elif isinstance(body, Constant):
        results = [body.value]
    elif isinstance(body, Pure):
        # The outputs were drawn in a loop, or are fed.
        if values.keys() >= {*op.outputs}:
            return
        results = apply(traced.jaxprs[op], [values[traced.real(t)] for t in op.inputs])
    else:
        assert isinstance(body, Update)
        old = [] if body.overwrites else [now[v] for v in body.variables]
        given = op.inputs[body.kernel_inputs :] if isinstance(body, Deferred) else op.inputs
        everything = apply(traced.jaxprs[op], [*old, *(values[traced.real(t)] for t in given)])
        now.update(zip(body.variables, everything, strict=False))
        # The outputs of a deferred update are the kernel's.
        if isinstance(body, Deferred):
            return
        results = everything[len(body.variables) :]
    # A fed tensor keeps its fed value.
    for tensor, value in zip(op.outputs, results, strict=True):
        values.setdefault(tensor, value)


def _apply_jaxpr(jaxpr: ClosedJaxpr, arguments: Sequence[AnyArray]) -> Sequence[AnyArray]:
    results: Sequence[AnyArray] = jax.extend.core.jaxpr_as_fun(jaxpr)(*arguments)
    return results
