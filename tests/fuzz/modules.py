"""Valid modules of StableHLO for a task that takes modules: what JAX makes of compositions of the samples, with numbers
in it changed as long as MLIR takes the module for valid. Verified, compiled and run in a child process.

The verifier may refuse them; what it lets through must not end the process.
"""

from __future__ import annotations

import dataclasses
import os
import random
import re
import resource
import select
import subprocess
import sys
import time
from collections import Counter
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from runtime.errors import OpError
from runtime.plan.exporting import export_program
from runtime.plan.plan import Program
from runtime.task.compiler import Compiler
from runtime.task.program_verifier import verify_program
from runtime.tensor_spec import TensorSpec
from tests.kit.processes import ROOT
from tests.runtime.expressions.samples import SAMPLES

SECS: Final = 60.0
"""For one of them, on a machine that does much else."""
START_SECS: Final = 300.0
SQUARE: Final = TensorSpec((4, 4), np.dtype(np.float32))
NUMBERS: Final = (0, 1, 2, 3, 4, 5, 8, 16, 63)
VALUE_BYTES: Final = 1 << 20


def composed(chance: random.Random) -> Program | None:
    """Some samples, one after the other; None where they do not go together."""
    names = chance.sample(sorted(SAMPLES), chance.choice((1, 2, 3)))

    def run(a: Any) -> tuple[Any, ...]:
        for name in names:
            result = jax.tree.leaves(SAMPLES[name](a))[0]
            a = jnp.resize(jnp.real(result).astype(jnp.float32), (4, 4))
        return (a,)

    try:
        return export_program(run, [SQUARE], "cpu")
    except Exception:  # whatever JAX says of functions that do not fit
        return None


def changed(program: Program, chance: random.Random) -> Program | None:
    """The program with a number of its module changed; None where MLIR finds that it is none then."""
    exported = export.deserialize(bytearray(program.blob))
    with mlir.make_ir_context() as context, ir.Location.unknown(context):
        module = stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized)
        text = str(module.operation.get_asm(print_generic_op_form=True))
        places = [m for m in re.finditer(r"(?<=[\[ =(,<x])\d{1,3}(?=[\], :>)x])", text)]
        if not places:
            return None
        for place in sorted(chance.sample(places, min(len(places), chance.choice((1, 2)))), key=lambda m: -m.start()):
            text = text[: place.start()] + str(chance.choice(NUMBERS)) + text[place.end() :]
        try:
            ir.Module.parse(text).operation.verify()
            version = stablehlo.get_current_version()
            blob = stablehlo.serialize_portable_artifact_str(text, version)
        except Exception:  # MLIR's own, of several kinds
            return None
    made = bytes(dataclasses.replace(exported, mlir_module_serialized=blob).serialize())
    return Program(made, program.arguments, program.results)


def attempt(program: Program) -> str:
    """Does with a module what a task does that takes them."""
    try:
        verify_program(program, VALUE_BYTES)
    except OpError as error:
        assert "\n" not in str(error)
        return "refused"
    try:
        executable = Compiler().executable(program, (), jax.local_devices()[0])
    except OpError:
        return "not compiled"
    jax.block_until_ready(executable(jnp.ones((4, 4), jnp.float32)))
    return "run"


def child(first: int, last: int, seed: int) -> None:
    """Attempts the modules of these numbers, and says before each which it is and after each how it went."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in range(first, last):
        chance = random.Random(f"modules:{seed}:{number}")
        print(f"at {number}", flush=True)
        program = composed(chance)
        if program is not None and chance.random() < 0.7:
            program = changed(program, chance)
        print("not valid" if program is None else attempt(program), flush=True)
        if number % 200 == 199:
            jax.clear_caches()


def fuzz(count: int, seed: int) -> str:
    """Attempts so many modules, in children one after the other."""
    counts: Counter[str] = Counter()
    ended: list[tuple[int, int | str]] = []
    first = 0
    while first < count:
        first = _one_child(first, count, seed, counts, ended)
    assert not ended, f"modules that ended the process, or took too long: {ended}; {dict(counts)}"
    return f"{count:,} modules: {dict(counts.most_common())}"


def _one_child(first: int, last: int, seed: int, counts: Counter[str], ended: list[tuple[int, int | str]]) -> int:
    command = [sys.executable, "-m", "tests.fuzz.modules", str(first), str(last), str(seed)]
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    number, until, pending = first - 1, time.monotonic() + START_SECS, b""
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        while select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            got = os.read(process.stdout.fileno(), 1 << 16)
            if not got:
                break
            *lines, pending = (pending + got).split(b"\n")
            for line in lines:
                word, _, rest = line.decode().partition(" ")
                if word == "at":
                    number, until = int(rest), time.monotonic() + SECS
                else:
                    counts[line.decode()] += 1
        else:
            process.kill()
            assert number >= first, "the child did not come to its first module"
            ended.append((number, "too long"))
            return number + 1
    if process.returncode:
        assert number >= first, "the child ended before its first module"
        ended.append((number, process.returncode))
    return number + 1


if __name__ == "__main__":
    child(*map(int, sys.argv[1:]))
