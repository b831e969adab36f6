"""The home of threads, locks, clocks and random numbers for ``runtime`` and ``harness``.

Every module of the two packages takes them from here and imports none of ``threading``, ``time``, ``random`` and
``secrets`` itself; ``tests/test_layers.py`` keeps it so. ``harness.launch`` is the exception: a launcher starts before
the runtime is imported. The names are those of the standard library where they say what they are, and cost what they
cost there.
"""

from __future__ import annotations

import random
import secrets
import threading
import time

__all__ = [
    "Condition",
    "Event",
    "Lock",
    "RLock",
    "Random",
    "Semaphore",
    "Thread",
    "current_thread",
    "local",
    "main_thread",
    "monotonic",
    "native_thread_id",
    "perf_counter_ns",
    "random_bytes",
    "random_hex",
    "random_id",
    "running_threads",
    "sleep",
    "thread_id",
    "uniform",
    "wall_time",
    "wall_time_ns",
]

Condition = threading.Condition
Event = threading.Event
Lock = threading.Lock
RLock = threading.RLock
Semaphore = threading.Semaphore
Thread = threading.Thread
local = threading.local
current_thread = threading.current_thread
main_thread = threading.main_thread
running_threads = threading.enumerate
thread_id = threading.get_ident
native_thread_id = threading.get_native_id

monotonic = time.monotonic
perf_counter_ns = time.perf_counter_ns
sleep = time.sleep
# Only for people and files: a wall clock may jump.
wall_time = time.time
wall_time_ns = time.time_ns

# Numbers that no other process may draw again, or guess.
random_bytes = secrets.token_bytes
random_hex = secrets.token_hex
random_id = secrets.randbits
# Numbers for pauses and plans, which a seed repeats.
uniform = random.uniform
Random = random.Random
