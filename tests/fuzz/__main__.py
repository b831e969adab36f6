"""Fuzzing by kind: what may come from elsewhere, made up and damaged, is an error and never the end of a task.

    python -m tests.fuzz [KIND] [NUMBER] [SEED]

Without a kind, or with "all", all are tried, each as often as its row says. A failure names the
seed and the number by which it is found again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from tests.fuzz import files, flag_values, frames, handshakes, orders, programs, protobufs


@dataclass(frozen=True)
class Kind:
    """One kind of what may come from elsewhere.

    Attributes:
        what: of it there is a number.
        number: by default.
        fuzz: tries so many with a seed; gives how it went, or raises AssertionError.
    """

    what: str
    number: int
    fuzz: Callable[[int, int], str]


KINDS: Final[Mapping[str, Kind]] = {
    "frames": Kind("frames of the tensor channel", 1_000_000, frames.fuzz),
    "handshakes": Kind("TLS handshakes with both ports", 100_000, handshakes.fuzz),
    "protobufs": Kind("requests to the gRPC port", 100_000, protobufs.fuzz),
    "programs": Kind("mutated expression lists", 100_000, programs.fuzz),
    "shapes": Kind("long, deep and wide expression lists", 100_000, programs.fuzz_shapes),
    "orders": Kind("orders in sequences", 20_000, orders.fuzz),
    "checkpoints": Kind("damaged checkpoint directories", 5_000, files.fuzz_checkpoints),
    "flags": Kind("values of flags", 50_000, flag_values.fuzz),
}


def main(arguments: list[str]) -> None:
    """Tries one kind, or all; a number of 0 is that of the kind."""
    name, number, seed = [*arguments, *("all", "0", "0")[len(arguments) :]]
    if name not in (*KINDS, "all"):
        sys.exit(f"KIND is one of {', '.join(KINDS)} or all, and not {name!r}")
    for one in KINDS if name == "all" else [name]:
        kind, began = KINDS[one], time.monotonic()
        went = kind.fuzz(int(number) or kind.number, int(seed))
        print(f"{one}: {went} ({time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
