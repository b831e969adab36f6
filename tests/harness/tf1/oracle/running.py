"""Runs drawn programs in TensorFlow and in harness.tf1, and shrinks those that give different results.

    python -m tests.harness.tf1.oracle.running [N] [SEED] [PYTHON]

PYTHON is the interpreter that has TensorFlow. ``record N FILE``, run by that interpreter, writes
down what TensorFlow gives for the first N seeds: the file that the tests compare with.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import select
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.harness.tf1.oracle.drawing import Statement, draw
from tests.harness.tf1.oracle.record import described, plain

Outcome = list[Any]
"""For each statement {"error": names of classes}, or a list with one entry for each of its names."""

LIMIT_SECS = 240.0
"""An engine that takes longer for a program hangs."""

LACKS = "basic_string::_M_construct", "No gradient defined for operation"
"""Parts of errors of TensorFlow that say nothing of harness.tf1."""

UNITS = 4096
"""So many units of the last place may two results differ, of the largest number in the array."""


def told(tf: Any, value: Any) -> Any:
    """Returns a value for JSON: what is compared."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, tf.Operation):
        return "operation"
    if isinstance(value, tf.Tensor | tf.Variable):
        return {"tensor": described(tf, value)[:2]}
    if isinstance(value, dict):
        return {key: told(tf, v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [told(tf, v) for v in value]
    array = np.asarray(value)
    dtype = "string" if array.dtype.kind in "OSU" else array.dtype.name
    return {"dtype": dtype, "shape": list(array.shape), "values": plain(array)}


def plainly(tf: Any) -> Any:
    """Returns the configuration of a session that computes what the program says.

    TensorFlow's graph optimizers change the results of a few programs: they compute a tensor such as
    ``t * t`` or a shape in another way, and ignore the value that a step feeds for the tensor.
    """
    config = tf.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
    if hasattr(config, "graph_options") and hasattr(config.graph_options, "rewrite_options"):
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        config.graph_options.optimizer_options.opt_level = -1
    return config


def outcome(tf: Any, program: Sequence[Statement]) -> Outcome:
    """Returns what each statement of a program gives; one that fails binds nothing."""
    found: Outcome = []
    with tf.Graph().as_default(), tf.Session(config=plainly(tf)) as sess, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names: dict[str, Any] = {"tf": tf, "np": np, "sess": sess}
        for statement in program:
            try:
                exec(statement.source, names)
                found.append([told(tf, names[name]) for name in statement.names])
            except Exception as error:  # whatever the error is: the class is what is compared
                # TensorFlow 2.21 fails while it words an error, whose kind nobody learns, or lacks a
                # second derivative.
                if any(lack in str(error) for lack in LACKS):
                    break
                classes = [c.__name__ for c in type(error).__mro__[:-2]]
                found.append({"error": classes, "message": str(error)[:400]})
    return found


def close(mine: Any, theirs: Any) -> bool:
    """Returns True if two arrays are equal beyond rounding."""
    if (mine["dtype"], mine["shape"]) != (theirs["dtype"], theirs["shape"]):
        return False
    if not theirs["dtype"].startswith(("float", "bfloat")):
        return bool(mine["values"] == theirs["values"])
    x, y = np.asarray(mine["values"], np.float64), np.asarray(theirs["values"], np.float64)
    finite = np.isfinite(y)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
        return False
    scale = np.max(np.abs(y[finite]), initial=1.0)
    eps = 2.0 ** {"float64": -52, "float16": -20}.get(theirs["dtype"], -23)
    return bool(np.all(np.abs(x[finite] - y[finite]) <= UNITS * eps * scale))


def same(mine: Any, theirs: Any) -> bool:
    """Returns True if two values are the same for a program."""
    if isinstance(theirs, dict) and "dtype" in theirs:
        return isinstance(mine, dict) and "dtype" in mine and close(mine, theirs)
    if isinstance(theirs, dict):
        return (
            isinstance(mine, dict)
            and mine.keys() == theirs.keys()
            and all(same(mine[key], theirs[key]) for key in theirs)
        )
    if isinstance(theirs, list) and theirs and isinstance(mine, list):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    return bool(mine == theirs)


def difference(mine: Outcome, theirs: Outcome) -> tuple[int, str, str] | None:
    """Returns the first statement that differs, the kind of its difference, and both results."""
    for i, (x, y) in enumerate(zip(mine, theirs, strict=False)):
        kind = _kind(x, y)
        if kind:
            return (
                i,
                kind,
                f"harness.tf1: {json.dumps(x)[:700]}\nTensorFlow:  {json.dumps(y)[:700]}",
            )
    return None


def _kind(x: Any, y: Any) -> str | None:
    x_fails, y_fails = (isinstance(v, dict) and "error" in v for v in (x, y))
    if x_fails and y_fails:
        fits = y["error"][0] in x["error"]
        return None if fits else f"{x['error'][0]}, not {y['error'][0]}"
    if x_fails or y_fails:
        return f"{x['error'][0]}, not a value" if x_fails else f"a value, not {y['error'][0]}"
    return None if same(x, y) else "another value"


class Engine:
    """A process that runs programs one after another, and is started anew when it hangs or dies."""

    def __init__(self, python: str, name: str) -> None:
        self._command = [python, "-m", "tests.harness.tf1.oracle.running", "serve", name]
        self._process: subprocess.Popen[bytes] | None = None

    def answer(self, program: Sequence[Statement]) -> Outcome | None:
        """Returns what a program gives; None if the process hangs or died."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=ENVIRONMENT,
            )
        assert self._process.stdin is not None
        text = json.dumps([[s.source, s.names] for s in program])
        self._process.stdin.write(text.encode() + b"\n")
        self._process.stdin.flush()
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], LIMIT_SECS)
        line = self._process.stdout.readline() if ready else b""
        if line:
            found: Outcome = json.loads(line)
            return found
        self.close()
        return None

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


ENVIRONMENT = {
    **os.environ,
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false",
}


class Pair:
    """TensorFlow and harness.tf1, each in a process of its own."""

    def __init__(self, python: str) -> None:
        self.engines = Engine(sys.executable, "harness"), Engine(python, "tensorflow")

    def compare(self, program: Sequence[Statement]) -> tuple[int, str, str] | None:
        """Returns the first difference of a program, or None."""
        return self.compare_all([program])[0]

    def compare_all(
        self, programs: Sequence[Sequence[Statement]]
    ) -> list[tuple[int, str, str] | None]:
        """Returns the first difference of each program; the engines run at the same time."""
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            mine, theirs = pool.map(lambda e: [e.answer(p) for p in programs], self.engines)
        return [self._of(*each) for each in zip(programs, mine, theirs, strict=True)]

    def _of(
        self, program: Sequence[Statement], mine: Outcome | None, theirs: Outcome | None
    ) -> tuple[int, str, str] | None:
        if mine is None or theirs is None:
            both = (("harness.tf1", mine), ("TensorFlow", theirs))
            silent = " and ".join(name for name, found in both if found is None)
            return len(program) - 1, f"no answer of {silent}", ""
        return difference(mine, theirs)

    def close(self) -> None:
        """Ends both processes."""
        for engine in self.engines:
            engine.close()


def shrink(
    program: list[Statement], kind: str, compare: Callable[[list[Statement]], Any]
) -> list[Statement]:
    """Returns the program without the statements that its difference does not need."""
    size = max(len(program) // 2, 1)
    while size:
        end = len(program)
        while end > 0:
            shorter = program[: max(end - size, 0)] + program[end:]
            found = compare(shorter) if shorter else None
            if found is not None and found[1] == kind:
                program = shorter[: found[0] + 1]
                end = min(end, len(program) + size)
            end -= size
        size //= 2
    return program


def search(number: int, first: int, python: str) -> list[str]:
    """Returns a report for each of ``number`` programs that gives different results."""
    pair, reports = Pair(python), []
    alike: dict[str, int] = {}
    for start in range(first, first + number, AT_ONCE):
        programs = [draw(seed) for seed in range(start, min(start + AT_ONCE, first + number))]
        for seed, (program, found) in enumerate(
            zip(programs, pair.compare_all(programs), strict=True), start
        ):
            if found is None:
                continue
            if found[1] == SILENT:
                print(f"seed {seed}: {SILENT}", flush=True)
                continue
            at, kind, both = found
            program = program[: at + 1]
            like = f"{kind} {program[-1].source.partition(' = ')[2].partition('(')[0]}"
            alike[like] = alike.get(like, 0) + 1
            if both and alike[like] <= MOST_ALIKE:
                program = shrink(program, kind, pair.compare)
                both = (pair.compare(program) or found)[2]
            text = "\n".join(s.source for s in program)
            reports.append(f"seed {seed}: {kind}\n{text}\n{both}\n")
            print(reports[-1], flush=True)
    pair.close()
    return reports


SILENT = "no answer of TensorFlow"
"""TensorFlow 2.21 dies of a few programs while it words an error, which says nothing of harness.tf1."""

AT_ONCE = 20
"""So many programs are sent to both engines before the answers are read."""

MOST_ALIKE = 2
"""Of differences that look alike so many are shrunk, which takes most of the time."""


def digest(program: Sequence[Statement]) -> int:
    """Returns a number that tells whether a recorded program is the one that is drawn today."""
    return zlib.crc32("\n".join(s.source for s in program).encode())


def engine(name: str) -> Any:
    """Returns the module ``tf`` of an engine."""
    if name == "harness":
        import harness.tf1 as tf

        return tf
    import tensorflow.compat.v1 as tensorflow

    tensorflow.disable_v2_behavior()
    tensorflow.disable_resource_variables()
    tensorflow.logging.set_verbosity(tensorflow.logging.FATAL)
    return tensorflow


def serve(name: str) -> None:
    """Answers each line of programs with a line of outcomes."""
    answers = os.fdopen(os.dup(1), "w")
    # Nothing but answers may come in between.
    os.dup2(2, 1)
    tf = engine(name)
    for line in sys.stdin:
        program = [Statement(source, tuple(names)) for source, names in json.loads(line)]
        answers.write(json.dumps(outcome(tf, program)) + "\n")
        answers.flush()


def record(number: int, path: str) -> None:
    """Writes down what TensorFlow gives for the first seeds."""
    os.environ.update(ENVIRONMENT)
    tf = engine("tensorflow")
    lines = []
    for seed in range(number):
        program = draw(seed)
        found = outcome(tf, program)
        kept = [{"error": f["error"][:1]} if isinstance(f, dict) else f for f in found]
        lines.append(
            json.dumps({"digest": digest(program), "outcome": kept}, separators=(",", ":"))
        )
    with open(path, "w") as out:
        out.write("[\n" + ",\n".join(lines) + "\n]\n")


def main(arguments: list[str]) -> None:
    """Runs one of the three commands."""
    if arguments[:1] == ["serve"]:
        serve(arguments[1])
    elif arguments[:1] == ["record"]:
        record(int(arguments[1]), arguments[2])
    else:
        number, seed, python = [
            *arguments,
            *("2000", "0", ".venv-bench/bin/python")[len(arguments) :],
        ]
        began = time.monotonic()
        reports = search(int(number), int(seed), python)
        took = time.monotonic() - began
        print(f"{number} programs from seed {seed}: {len(reports)} differ ({took:.0f} s)")
        sys.exit(bool(reports))


if __name__ == "__main__":
    main(sys.argv[1:])
