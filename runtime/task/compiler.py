"""The compiler of a process.

A program is compiled once for each identity and device, for all sessions and all tasks of the
process.
"""

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from runtime import concurrency
from runtime.errors import InvalidArgumentError, OpError, ResourceExhaustedError, meaning, one_line
from runtime.expressions.parts import ProgramPart, split
from runtime.expressions.reader import PART, ExpressionList, jax_settings, read_expressions
from runtime.graph.mesh import spread
from runtime.plan.evaluator import evaluate
from runtime.plan.plan import Program, ProgramIdentity
from runtime.task import times
from runtime.tensor_spec import TensorSpec

Executable = Callable[..., list[jax.Array]]

KEPT = 512
"""Executables in the cache, those that were requested last.

A registered stage keeps its own executable besides.
"""


class Compiler:
    """A cache of executables. Thread safe; programs that differ compile at the same time.

    Args:
        kept: Number of executables that are kept.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._lock = concurrency.Lock()
        self._entries: OrderedDict[
            tuple[ProgramIdentity, jax.Device | Mesh, tuple[int, ...]], _CacheEntry
        ] = OrderedDict()
        self.compilations = 0
        """The number of programs that were compiled, for tests."""

    def __len__(self) -> int:
        """Returns the number of executables that are kept."""
        return len(self._entries)

    def executable(
        self, program: Program, donate: Sequence[int], device: jax.Device | Mesh
    ) -> Executable:
        """Returns the compiled program, whose arguments ``donate`` are updated in place.

        Raises:
            InvalidArgumentError: The program is damaged, or does what a stage must not do.
            ResourceExhaustedError: The compiler has no memory, or takes longer than ``times.COMPILE_SECS``.
        """
        if program.is_evaluated and program.jaxpr is not None and not isinstance(device, Mesh):
            return functools.partial(evaluate, program.jaxpr, device)
        key = (program.identity, device, tuple(donate))
        with self._lock:
            entry = self._entries.setdefault(key, _CacheEntry())
            self._entries.move_to_end(key)
            while len(self._entries) > self._kept:
                self._entries.popitem(last=False)
        # A lock for each entry: two sessions with one program compile once, and other programs do
        # not wait.
        with entry.lock:
            if entry.executable is None:
                entry.executable = _compile(program, donate, device)
                with self._lock:
                    self.compilations += 1
            return entry.executable


class _CacheEntry:
    def __init__(self) -> None:
        self.lock = concurrency.Lock()
        self.executable: Executable | None = None


def _compile(program: Program, donate: Sequence[int], device: jax.Device | Mesh) -> Executable:
    try:
        with contextlib.ExitStack() as settings:
            # The arguments declare their own sizes, which JAX would narrow to 32 bits.
            settings.enter_context(jax.enable_x64(True))
            # Only a device other than the default one is named: naming it costs on every call.
            is_default = device == jax.local_devices()[0]

            def find_sharding(spec: TensorSpec) -> Sharding | None:
                if isinstance(device, Mesh):
                    return spread(device, spec.shape)
                return None if is_default else SingleDeviceSharding(device)

            avals = [
                jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=find_sharding(s))
                for s in program.arguments
            ]
            if isinstance(device, jax.Device) and not is_default:
                settings.enter_context(jax.default_device(device))
            if program.jaxpr is not None:
                compute = jax.extend.core.jaxpr_as_fun(program.jaxpr)
                results_on = [find_sharding(spec) for spec in program.results]
                executable, results = _compile_one(compute, avals, donate, results_on)
                _check_results(results, program)
                return executable
            expressions = read_expressions(program.blob)
            if expressions.arguments != program.arguments:
                raise InvalidArgumentError(
                    "the program's arguments are not those that its stage declares"
                )
            settings.enter_context(jax_settings(expressions))
            return _compile_list(expressions, avals, donate, program)
    except OpError:
        raise
    except Exception as error:
        kind = (
            ResourceExhaustedError
            if meaning(error) is ResourceExhaustedError
            else InvalidArgumentError
        )
        raise kind(f"the program could not be compiled for {device}: {one_line(error)}") from error


def _compile_one(
    compute: Callable[..., Sequence[jax.Array]],
    avals: Sequence[jax.ShapeDtypeStruct],
    donate: Collection[int],
    results_on: Sequence[Sharding | None] | None = None,
) -> tuple[Executable, list[jax.ShapeDtypeStruct]]:
    def run(*arguments: jax.Array) -> Sequence[jax.Array]:
        return compute(*arguments)

    jitted = jax.jit(run, donate_argnums=tuple(donate), out_shardings=results_on)
    traced = jitted.trace(*avals)
    executable: Executable = traced.lower().compile()
    return executable, jax.tree.leaves(traced.out_info)


def _check_results(results: Sequence[jax.ShapeDtypeStruct], program: Program) -> None:
    found = tuple(TensorSpec.of(result) for result in results)
    if found != program.results:
        raise InvalidArgumentError(
            f"the program gives ({', '.join(map(str, found))}), its stage declares "
            f"({', '.join(map(str, program.results))})"
        )


class _CompiledPart(NamedTuple):
    """The compiled program of a part.

    Attributes:
        executable: The program.
        takes: The values of the list that are arguments.
        gives: The values of the list that are results.
        dropped: The arguments that no later part takes.
    """

    executable: Executable
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    dropped: list[int]


def _compile_list(
    expressions: ExpressionList,
    avals: Sequence[jax.ShapeDtypeStruct],
    donate: Sequence[int],
    program: Program,
) -> Executable:
    """Compiles the parts of a list; a part that is equal to an earlier one, once."""
    parts, numbers = split(expressions, PART)
    steps, specs = _compile_parts(parts, set(numbers), avals, donate)
    _check_results([specs[n] for n in numbers], program)
    if len(steps) == 1:
        return steps[0].executable

    def run(*arguments: jax.Array) -> list[jax.Array]:
        values = dict(enumerate(arguments))
        for executable, takes, gives, dropped in steps:
            results = executable(*[values[n] for n in takes])
            # The memory of an argument is free when its last part has run.
            for n in dropped:
                del values[n]
            values.update(zip(gives, results, strict=True))
        return [values[n] for n in numbers]

    return run


def _compile_parts(
    parts: Sequence[ProgramPart],
    kept: Collection[int],
    avals: Sequence[jax.ShapeDtypeStruct],
    donate: Collection[int],
) -> tuple[list[_CompiledPart], dict[int, jax.ShapeDtypeStruct]]:
    """Compiles the parts in their order; returns their programs, and the types of all values.

    Args:
        parts: The parts.
        kept: The values that are results of the list.
        avals: Types of the list's arguments.
        donate: The arguments whose memory the list may use.

    Raises:
        ResourceExhaustedError: The compiler took longer than ``times.COMPILE_SECS``.
    """
    began = concurrency.monotonic()
    known: dict[object, tuple[Executable, list[jax.ShapeDtypeStruct]]] = {}
    specs = dict(enumerate(avals))
    used_last = {n: index for index, part in enumerate(parts) for n in part.takes}
    steps = []
    for index, part in enumerate(parts):
        dropped = [n for n in part.takes if used_last[n] == index and n not in kept]
        given = [specs[n] for n in part.takes]
        last = {i for i, n in enumerate(part.takes) if n in donate and n in dropped}
        key = part.identity, frozenset(last), tuple((spec.shape, spec.dtype) for spec in given)
        if key not in known:
            # XLA itself cannot be interrupted, so the time is looked at between two parts.
            if index and (spent := concurrency.monotonic() - began) > times.COMPILE_SECS:
                raise ResourceExhaustedError(
                    f"{index} of {len(parts)} parts took {spent:.0f} s to compile, more than "
                    f"{times.COMPILE_SECS:g} s: "
                    "make smaller updates, or spread the variables over more ps tasks"
                )
            known[key] = _compile_one(part.expressions.compute, given, last)
        executable, results = known[key]
        specs.update(zip(part.gives, results, strict=True))
        steps.append(_CompiledPart(executable, part.takes, part.gives, dropped))
    return steps, specs
