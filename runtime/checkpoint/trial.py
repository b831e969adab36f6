"""Trials: what may unpack to more than it says is read first by a process of its own, whose memory is watched.

Tensorstore unpacks a chunk, or the index of a store, as a whole, and ends the process where there is no memory for it.
Our own checkpoints hold nothing that is packed, and have no trial; those of other programs and earlier versions may.
The process is in a sandbox (`runtime.sandbox`): it can read files, and reach nothing else.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from runtime import sandbox
from runtime.errors import DataLossError

MEMORY: Final = 512 << 20
"""What reading takes besides the arrays: Python, tensorstore and its threads."""
TIMES: Final = 4
"""How many times as much memory as the largest array it may take: packed, as a chunk, as values, and once to spare."""
SECS: Final = 600.0
_LOOK_SECS: Final = 0.02
_PROGRAM: Final = Path(__file__).with_name("trial_program.py")


def read_apart(specs: Sequence[Any], most_bytes: int, where: str, *, values: bool) -> None:
    """Reads arrays in a process of its own.

    Args:
        specs: of tensorstore.
        most_bytes: of the largest array.
        where: the directory, for errors.
        values: read the values, not only what says what the arrays are.

    Raises:
        DataLossError: that process took too much memory or time, or was ended by the system.
    """
    limit = MEMORY + TIMES * most_bytes
    started = time.monotonic()
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-P", str(_PROGRAM)], stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps({"arrays": list(specs), "values": values}))
            process.stdin.close()
            watched = psutil.Process(process.pid)
            problem = ""
            while not problem and process.poll() is None:
                try:
                    if watched.memory_info().rss > limit:
                        problem = f"to read it takes more than {limit} bytes of memory"
                except psutil.NoSuchProcess:  # it has just ended
                    continue
                if time.monotonic() - started > SECS:
                    problem = f"to read it takes more than {SECS:g} s"
                _wait(process)
        except BrokenPipeError:
            problem = ""
        finally:
            process.kill()
        told = "" if process.stdout is None else process.stdout.readline().rstrip()
        if told:
            sandbox.warn_without(told)
    if not problem and process.returncode:
        ended = -process.returncode
        problem = f"reading it ended with {signal.Signals(ended).name if ended > 0 else f'code {process.returncode}'}"
    if problem:
        raise DataLossError(f"{where} is damaged, or made to do harm: {problem}, in a process of its own")


def _wait(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(_LOOK_SECS)
    except subprocess.TimeoutExpired:
        return
