"""Fuzzing of expression lists: mutated programs are read, compiled and run in a child process, which must not end.

    python -m tests.runtime.expressions.fuzz [PROGRAMS] [SEED]

A program of the samples is taken, changed in one place to three (operands, operations, attributes,
shapes, constants, computations in computations, or bytes), and treated as one that has come over
the wire; if it is let in, it runs. The child tells which program it is at. If it ends, the program
is printed, to be found again by its number; if one program takes too long, the child is replaced,
as a loop may be endless. Memory must stay flat.
"""

from __future__ import annotations

import os
import random
import resource
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import psutil

from runtime.errors import OpError
from runtime.expressions import reader
from runtime.expressions.parts import split
from runtime.expressions.reader import jax_settings, read_expressions
from runtime.expressions.table import TABLE
from runtime.plan.plan import Program
from runtime.proto import expressions_pb2 as pb
from runtime.task.compiler import Compiler
from runtime.tensor_spec import NUMERIC_DTYPES, TensorSpec
from tests.runtime.expressions.samples import SAMPLES
from tests.runtime.expressions.shapes import shaped
from tests.runtime.expressions.test_round_trip import A, written

TOO_LONG_SECS = 20.0
"""How long a program may take, in seconds of the processor: other work on the machine does not count."""
START_SECS = 300.0
"""How long a child may take to its first program, in seconds of the processor."""
STUCK_SECS = 1200.0
"""How long a child may say nothing at all, in seconds of the clock."""
COMPILED_SHARE = 0.01
"""The part of the shaped lists that XLA compiles: a thousand of 100,000, which two cores can do in half an hour."""
VALUE_BYTES = 1 << 20
"""How large a value may be here, so that many programs run in little memory."""
WORDS = sorted(
    {
        *NUMERIC_DTYPES,
        "string",
        "FILL_OR_DROP",
        "CLIP",
        "PROMISE_IN_BOUNDS",
        "rbg",
        "threefry2x32",
        "FFT",
        "IRFFT",
        "RFFT",
    }
    | {
        "HIGHEST,HIGHEST",
        "BF16_BF16_F32",
        "ANY_F8_ANY_F8_F32",
        "RNG_DEFAULT",
        "RNG_PHILOX",
        "TO_NEAREST_EVEN",
        "ge",
        "",
    }
)
NUMBERS = (
    -(1 << 62),
    -(1 << 31),
    -2,
    -1,
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    16,
    63,
    64,
    1 << 20,
    1 << 31,
    1 << 40,
    1 << 62,
)


def computations(message: pb.ComputationDef) -> list[pb.ComputationDef]:
    found = [message]
    for equation in message.equations:
        for attribute in equation.attributes:
            for inner in attribute.computations.values:
                found += computations(inner)
    return found


def mutate(message: pb.ExpressionsDef, chance: random.Random, others: list[bytes]) -> None:
    """Changes a list in one place."""
    body = chance.choice(computations(message.main))
    if not body.equations or chance.random() < 0.1:
        _mutate_frame(message, body, chance)
        return
    index = chance.randrange(len(body.equations))
    equation = body.equations[index]
    match chance.randrange(9 if chance.random() < 0.2 else 7):
        case 0:
            like = [
                name
                for name, row in TABLE.items()
                if set(row.attributes) == {a.name for a in equation.attributes}
            ]
            equation.operation = chance.choice(like or list(TABLE))
        case 1 if equation.operands:
            at = chance.randrange(len(equation.operands))
            equation.operands[at] = chance.randrange(
                -len(message.constants), body.arguments + index + 1
            )
        case 2 if equation.operands and chance.random() < 0.2:
            equation.operands.pop(chance.randrange(len(equation.operands)))
        case 3 if chance.random() < 0.2:
            equation.operands.append(
                chance.randrange(-len(message.constants), max(1, body.arguments))
            )
        case 2 | 3 | 4 | 5 | 6 if equation.attributes:
            _mutate_attribute(chance.choice(equation.attributes), chance)
        case 7:
            other = pb.ExpressionsDef.FromString(chance.choice(others))
            taken = chance.choice(chance.choice(computations(other.main)).equations or [equation])
            equation.operation = taken.operation
            del equation.attributes[:]
            equation.attributes.extend(taken.attributes)
            equation.results = taken.results
        case 8:
            equation.results = max(0, equation.results + chance.choice((-1, 1)))


def _mutate_frame(
    message: pb.ExpressionsDef, body: pb.ComputationDef, chance: random.Random
) -> None:
    match chance.randrange(6):
        case 0 if message.arguments:
            message.arguments[0].dtype = chance.choice(WORDS)
        case 1 if message.arguments and message.arguments[0].shape:
            message.arguments[0].shape[0] = chance.choice(NUMBERS)
        case 2 if body.results:
            body.results[0] = chance.randrange(-2, 8)
        case 3 if message.constants:
            constant = chance.choice(message.constants)
            constant.data = chance.randbytes(len(constant.data))
        case 4 if message.constants:
            chance.choice(message.constants).spec.dtype = chance.choice(WORDS)
        case _:
            body.arguments += chance.choice((-1, 1))


def _mutate_attribute(attribute: pb.AttributeDef, chance: random.Random) -> None:
    kind = attribute.WhichOneof("value")
    if kind == "integers" and attribute.integers.values:
        values = attribute.integers.values
        at = chance.randrange(len(values))
        match chance.randrange(4):
            case 0:
                values.pop(at)
            case 1:
                values.append(chance.choice(NUMBERS))
            case 2:
                values[at] = chance.choice(NUMBERS)
            case _:
                values[at] += chance.choice((-1, 1))
    elif kind == "integer":
        attribute.integer = chance.choice(
            (attribute.integer + 1, attribute.integer - 1, chance.choice(NUMBERS))
        )
    elif kind == "flag":
        attribute.flag = not attribute.flag
    elif kind == "word":
        attribute.word = chance.choice(WORDS)
    elif kind == "computations" and attribute.computations.values:
        attribute.computations.values.append(chance.choice(attribute.computations.values))
        attribute.computations.values.pop(0)
    else:
        attribute.number = chance.choice((0.0, -1.0, float("nan"), 1e300))


def mutated(number: int, seed: int, corpus: list[bytes]) -> bytes:
    """The program of a number: the same in every process."""
    chance = random.Random(f"{seed}:{number}")
    data = chance.choice(corpus)
    if chance.random() < 0.1:
        damaged = bytearray(data)
        for _ in range(chance.choice((1, 2, 8))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        return bytes(damaged)
    message = pb.ExpressionsDef.FromString(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        mutate(message, chance, corpus)
    return message.SerializeToString()


def attempt(data: bytes, compiled_too: bool = True) -> str:
    """Does with a program what a task does: "refused", "not compiled" or "run"; "read" if it is read and cut only."""
    try:
        expressions = read_expressions(data)
    except OpError as error:
        assert "\n" not in str(error)
        return "refused"
    if not compiled_too:
        split(expressions, reader.PART)
        return "read"
    avals = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in expressions.arguments]
    with jax.enable_x64(True), jax_settings(expressions):
        try:
            results = jax.tree.leaves(jax.eval_shape(expressions.compute, *avals))
            program = Program(
                data, expressions.arguments, tuple(TensorSpec.of(result) for result in results)
            )
            compiled = Compiler().executable(program, (), jax.devices()[0])
        except Exception:  # what the compiler of a task makes an InvalidArgumentError of
            return "not compiled"
        values: list[Any] = [np.ones(spec.shape, spec.dtype) for spec in expressions.arguments]
        try:
            jax.block_until_ready(compiled(*values))
        except Exception:
            return "not compiled"
    return "run"


def child(first: int, last: int, seed: int, kind: str) -> None:
    """Attempts the programs of these numbers, and says before each which it is and after each how it went."""
    reader.VALUE_BYTES = VALUE_BYTES
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    corpus = [written(fn, A) for fn in SAMPLES.values()]
    for number in range(first, last):
        print(f"at {number}", flush=True)
        data = mutated(number, seed, corpus) if kind == "mutated" else shaped(number, seed)
        # Only XLA can end the process, and it takes seconds for most shapes: the others are read
        # and cut into parts.
        compiled_too = (
            kind == "mutated"
            or random.Random(f"compiled {seed}:{number}").random() < COMPILED_SHARE
        )
        print(attempt(data, compiled_too), flush=True)
        if number % 500 == 499:
            jax.clear_caches()
            print(f"memory {psutil.Process().memory_info().rss}", flush=True)


@dataclass
class Outcome:
    """How it went.

    Attributes:
        counts: of each way in which a program can end.
        crashed: the numbers of the programs that ended the child, with its exit status.
        slow: of those that took too long.
        memory: resident bytes of the child, every 500 programs.
    """

    counts: dict[str, int]
    crashed: list[tuple[int, int]]
    slow: list[int]
    memory: list[list[int]]


def _nothing(number: int) -> None:
    pass


def fuzz(
    programs: int,
    seed: int = 0,
    first: int = 0,
    tried: Callable[[int], None] = _nothing,
    kind: str = "mutated",
) -> Outcome:
    """Runs programs in children, one after the other; tells the number of each that has neither ended one nor taken too
    long."""
    outcome = Outcome({}, [], [], [])
    last = first + programs
    while first < last:
        first = _one_child(first, last, seed, outcome, tried, kind)
    return outcome


def _one_child(
    first: int, last: int, seed: int, outcome: Outcome, tried: Callable[[int], None], kind: str
) -> int:
    """Runs one child until its end; gives the number of the program to go on with."""
    command = [
        sys.executable,
        "-m",
        "tests.runtime.expressions.fuzz",
        "child",
        str(first),
        str(last),
        str(seed),
        kind,
    ]
    environ = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    }
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ
    )
    outcome.memory.append([])
    child = psutil.Process(process.pid)
    number, began, spent, limit, pending = first - 1, time.monotonic(), 0.0, START_SECS, b""
    assert process.stdout is not None
    with process, process.stdout:
        while True:
            ready, _, _ = select.select([process.stdout], [], [], 1.0)
            if not ready:
                stuck = time.monotonic() - began > STUCK_SECS
                if not stuck and _processor_secs(child) - spent < limit:
                    continue
                process.kill()
                if number < first:
                    raise RuntimeError(
                        f"the child did not come to its first program in {START_SECS} s of the processor"
                    )
                outcome.slow.append(number)
                print(f"program {number} took more than {TOO_LONG_SECS} s", flush=True)
                return number + 1
            got = os.read(process.stdout.fileno(), 1 << 16)
            if not got:
                break
            *lines, pending = (pending + got).split(b"\n")
            for line in lines:
                word, _, rest = line.decode().partition(" ")
                if word == "at":
                    number, limit = int(rest), TOO_LONG_SECS
                    began, spent = time.monotonic(), _processor_secs(child)
                elif word == "memory":
                    outcome.memory[-1].append(int(rest))
                else:
                    outcome.counts[line.decode()] = outcome.counts.get(line.decode(), 0) + 1
                    tried(number)
                    began, spent = time.monotonic(), _processor_secs(child)
        if process.wait() != 0:
            if number < first:
                raise RuntimeError("the child ended before its first program")
            outcome.crashed.append((number, process.returncode))
            print(f"program {number} ended the process with {process.returncode}", flush=True)
    return number + 1


def _processor_secs(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Runs the programs of the command line."""
    if sys.argv[1:2] == ["child"]:
        child(*map(int, sys.argv[2:5]), sys.argv[5])
        return
    programs, seed = [*map(int, sys.argv[1:]), *(100_000, 0)[len(sys.argv) - 1 :]]
    outcome = fuzz(programs, seed)
    print(f"{programs:,} programs: {outcome.counts}; took too long: {outcome.slow}")
    print("memory in MB:", [[n >> 20 for n in run] for run in outcome.memory])
    corpus = [written(fn, A) for fn in SAMPLES.values()] if outcome.crashed else []
    for number, status in outcome.crashed:
        print(f"\nPROGRAM {number} ENDED THE PROCESS with {status}:")
        print(pb.ExpressionsDef.FromString(mutated(number, seed, corpus)))
    sys.exit(bool(outcome.crashed))


if __name__ == "__main__":
    main()
