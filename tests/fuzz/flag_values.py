"""Any text as the value of any flag of the trainer: a config, or one line that names the flag."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import fields
from typing import Final

from absl import flags
from absl.testing import flagsaver

import runtime as rt
from models.mnist.config import RunConfig

TEXTS: Final = (
    *(
        "",
        " ",
        ",",
        "0",
        "-1",
        "1e309",
        "nan",
        "inf",
        "1" * 400,
        "0x10",
        "1_000",
        "true",
        "none",
        "None",
        "\x00",
        "é",
        "\x1b[2J",
    ),
    *(
        "a:b",
        "host:1,host:1",
        "host:99999",
        "[::1]:2222",
        "::",
        "http://x",
        "../..",
        "/dev/zero",
        "a" * 5000,
        "10,10",
        "5,1",
    ),
)


def value(chance: random.Random) -> str:
    """A text, or several beside each other."""
    made = "".join(chance.choice(TEXTS) for _ in range(chance.choice((1, 1, 2, 3))))
    return (
        made
        if chance.random() < 0.9
        else "".join(chr(chance.randrange(1, 0x2FF)) for _ in range(chance.randrange(9)))
    )


def fuzz(count: int, seed: int) -> str:
    """Reads so many command lines."""
    chance = random.Random(f"flags:{seed}")
    counts: Counter[str] = Counter()
    names = sorted(
        [row.name for row in fields(RunConfig) if row.metadata]
        + [f"limit_{r.name}" for r in rt.Limits.rows()]
    )
    for _ in range(count):
        chosen = chance.sample(names, chance.choice((1, 1, 2, 3)))
        line = ["program", *(f"--{name}={value(chance)}" for name in chosen)]
        with flagsaver.flagsaver():
            try:
                flags.FLAGS(line)
                problem = RunConfig.from_flags().problem()
            except (flags.Error, rt.OpError) as error:
                problem = str(error)
        assert problem is None or any(name.removeprefix("limit_") in problem for name in names), (
            line,
            problem,
        )
        counts["taken" if problem is None else "refused by name"] += 1
    return f"{count:,} command lines: {dict(counts.most_common())}"
