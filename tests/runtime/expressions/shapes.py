"""Long, deep and wide expression lists: what costs a compiler most, of every plain operation of the table."""

from __future__ import annotations

import random
from collections.abc import Sequence

from runtime.expressions.reader import PART
from runtime.expressions.table import TABLE
from runtime.proto import expressions_pb2 as pb
from runtime.proto import stage_pb2

PLAIN = {
    name: 2 for name in "add atan2 div igamma igammac max mul nextafter pow rem sub zeta".split()
} | {
    name: 1
    for name in """
        abs acosh asin asinh atanh bessel_i0e cbrt cos cosh digamma erf erf_inv exp expm1 lgamma log log1p logistic neg
        rsqrt sin sinh sqrt tan tanh
    """.split()
}
"""Operations without attributes, of numbers of float32, with how many operands."""
MOST = 4 * PART
"""The most equations of a list, and of a computation in it."""


def equation(
    name: str, operands: Sequence[int], results: int = 1, **attributes: object
) -> pb.EquationDef:
    """Returns an equation; an attribute is an integer, a flag, a list of integers or of computations."""
    made = pb.EquationDef(operation=name, operands=operands, results=results)
    for key, value in attributes.items():
        attribute = made.attributes.add(name=key)
        if isinstance(value, bool):
            attribute.flag = value
        elif isinstance(value, int):
            attribute.integer = value
        elif isinstance(value, list) and value and isinstance(value[0], pb.ComputationDef):
            attribute.computations.values.extend(value)
        elif isinstance(value, list):
            attribute.integers.values.extend(value)
        else:
            attribute.word = str(value)
    return made


def plain(name: str, first: int, second: int) -> pb.EquationDef:
    """Returns an operation of PLAIN applied to values."""
    return equation(name, (first, second)[: PLAIN[name]])


def chain(names: Sequence[str], length: int, argument: int = 0) -> pb.ComputationDef:
    """Returns a chain, in which each operation takes the last value and the one before."""
    made = pb.ComputationDef(arguments=argument + 1)
    for index in range(length):
        value = argument + index
        made.equations.append(plain(names[index % len(names)], value, max(0, value - 1)))
    made.results.append(argument + length)
    return made


def wide(names: Sequence[str], length: int, size: int) -> pb.ComputationDef:
    """Returns operations side by side, each of a slice of its own and with a result of its own."""
    made = pb.ComputationDef(arguments=1)
    for index in range(max(1, length // 2)):
        at = index % (size // 2)
        made.equations.append(
            equation("slice", [0], start_indices=[at], limit_indices=[at + size // 2])
        )
        made.equations.append(plain(names[index % len(names)], 2 * index + 1, 2 * index + 1))
        made.results.append(2 * index + 2)
    return made


def tree(names: Sequence[str], length: int, size: int) -> pb.ComputationDef:
    """Returns operations side by side whose results are added up in pairs."""
    made = wide(names, length // 2, size)
    values = len(made.equations) + 1
    while len(made.results) > 1:
        made.equations.append(equation("add", made.results[:2]))
        made.results[:] = [*made.results[2:], values]
        values += 1
    return made


def deep(names: Sequence[str], length: int, depth: int, operation: str) -> pb.ComputationDef:
    """Returns loops or branches within each other; a loop lies in the condition of the next, too."""
    inner = chain(names, length)
    made, flag = (
        inner,
        pb.ComputationDef(arguments=1, equations=[equation("lt", [0, 0])], results=[1]),
    )
    for _ in range(depth):
        made = pb.ComputationDef(arguments=1)
        match operation:
            case "scan":
                loop = {"length": 2, "reverse": False, "unroll": 1, "num_consts": 0, "num_carry": 1}
                made.equations.append(equation("scan", [0], jaxpr=[inner], **loop))
            case "while":
                consts = {"cond_nconsts": 0, "body_nconsts": 0}
                made.equations.append(
                    equation("while", [0], cond_jaxpr=[flag], body_jaxpr=[inner], **consts)
                )
                flag = pb.ComputationDef(
                    arguments=1, equations=[*made.equations, equation("lt", [1, 1])], results=[2]
                )
            case _:
                empty = pb.ComputationDef(arguments=1, results=[0])
                made.equations.append(equation("convert_element_type", [0], new_dtype="int32"))
                made.equations.append(equation("cond", [1, 0], branches=[inner, empty]))
        made.results.append(len(made.equations))
        if operation != "while":
            inner = made
    return made


def branches(names: Sequence[str], count: int) -> pb.ComputationDef:
    """Returns a conditional of many branches, every other of which is empty."""
    either = [chain(names, 1), pb.ComputationDef(arguments=1, results=[0])]
    index = equation("convert_element_type", [0], new_dtype="int32")
    cond = equation("cond", [1, 0], branches=[either[i % 2] for i in range(count)])
    return pb.ComputationDef(arguments=1, equations=[index, cond], results=[2])


def shaped(number: int, seed: int) -> bytes:
    """Returns the list of a number: the same in every process."""
    chance = random.Random(f"shapes {seed}:{number}")
    names = chance.sample([*PLAIN], chance.choice((1, 1, 2, 5)))
    length = int(MOST ** chance.uniform(0.2, 1.0))
    size: int | None = chance.choice((None, 64))
    match chance.randrange(6):
        case 0:
            main = chain(names, length)
        case 1:
            size, main = 600, wide(names, length, 600)
        case 2:
            size, main = 600, tree(names, length, 600)
        case 3:
            depth = chance.randrange(1, 20)
            size, main = (
                None,
                deep(
                    names, max(1, length // depth), depth, chance.choice(("scan", "while", "cond"))
                ),
            )
        case 4:
            size, main = None, branches(names, length)
        case _:
            many = equation("concatenate", [0] * length, dimension=0)
            size, main = 4, pb.ComputationDef(arguments=1, equations=[many] * 2, results=[1, 2])
    spec = stage_pb2.TensorSpecDef(shape=[] if size is None else [size], dtype="float32")
    assert all(name in TABLE for name in names)
    return pb.ExpressionsDef(arguments=[spec], main=main).SerializeToString()
