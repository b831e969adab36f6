"""Parts: a list that costs more than XLA survives is compiled and run in several programs, one after the other.

The compiler of a task calls this. A list is cut where the fewest values cross: between variables,
where a list updates many of them. So equal variables make equal parts, which are compiled once.
"""

import bisect
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.expressions.reader import Computation, Equation, ExpressionList


@dataclass(frozen=True, eq=False, slots=True)
class ProgramPart:
    """Consecutive equations of a list as a program of their own.

    Attributes:
        expressions: The program; the shapes of its arguments are known when the parts before are
            traced.
        takes: The values of the whole list that are arguments of the program.
        gives: The values of the whole list that are results of the program.
        identity: The hash of the computation. Equal parts have equal hashes.
    """

    expressions: ExpressionList
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    identity: bytes


def split(expressions: ExpressionList, most: int) -> tuple[list[ProgramPart], tuple[int, ...]]:
    """Splits a list into parts.

    Args:
        expressions: The list.
        most: The cost of a part.

    Returns:
        The parts in their order, and the values that are the results of the list. All of these
        values are different.

    Examples:
        >>> parts, results = split(read_expressions(blob), PART)  # doctest: +SKIP
    """
    main = expressions.main
    # Nearly every list is one part, and stays as it is.
    if sum(equation.cost for equation in main.equations) <= most:
        # The program is compiled under its own hash, so its only part needs none.
        numbers = tuple(range(main.arguments, main.arguments + len(main.results)))
        return [ProgramPart(expressions, tuple(range(main.arguments)), numbers, b"")], numbers
    # By equation, the number of its first value.
    counts = (equation.results for equation in main.equations)
    made = list(itertools.accumulate(counts, initial=main.arguments))
    parts, begin = [], 0
    used_last = {n: i for i, equation in enumerate(main.equations) for n in equation.operands}
    needed = set(main.results)
    for end in _find_ends(main, made, used_last, most):
        equations, values = main.equations[begin:end], range(made[begin], made[end])
        # A value that no later equation reads stays inside of the part.
        gives = tuple(n for n in values if n in needed or used_last.get(n, 0) >= end)
        taken = dict.fromkeys(n for e in equations for n in e.operands if 0 <= n < values.start)
        if gives:
            parts.append(_make_part(expressions, equations, tuple(taken), gives, values))
        begin = end
    assert begin == len(main.equations)
    copies, results = _copied_results(expressions, made[-1])
    assert len(set(results)) == len(results), "two results would share an array"
    return [*parts, *copies], results


def _copied_results(
    expressions: ExpressionList, first: int
) -> tuple[list[ProgramPart], tuple[int, ...]]:
    """Returns a last part that copies results, if the list needs one, and the numbers of all results.

    Args:
        expressions: The list.
        first: Number of the first copy.
    """
    main = expressions.main
    results, odd = list(main.results), []
    # In one program XLA copies a result that is an argument, a constant, or another result as well.
    # The parts would pass the array itself on, so a last part makes the copies.
    for position, number in enumerate(main.results):
        if number < main.arguments or number in main.results[:position]:
            odd.append(number)
            results[position] = first + len(odd) - 1
    if not odd:
        return [], tuple(results)
    takes = tuple(dict.fromkeys(n for n in odd if n >= 0))
    computation = Computation(len(takes), (), tuple(takes.index(n) if n >= 0 else n for n in odd))
    gives = tuple(range(first, first + len(odd)))
    return [
        ProgramPart(_replace_main(expressions, computation), takes, gives, b"%d" % first)
    ], tuple(results)


def _find_ends(
    main: Computation, made: Sequence[int], used_last: dict[int, int], most: int
) -> list[int]:
    """Finds the end of each part: a place within the second half that the fewest values cross."""
    # By equation, the number of values that are made before the place behind it and read after.
    crossing, over = [], [0] * (len(main.equations) + 1)
    now = 0
    for index in range(len(main.equations)):
        for number in range(made[index], made[index + 1]):
            if (last := used_last.get(number, 0)) > index:
                now += 1
                over[last] += 1
        now -= over[index]
        crossing.append(now)
    totals, ends = [0, *itertools.accumulate(equation.cost for equation in main.equations)], [0]
    while totals[-1] - totals[ends[-1]] > most:
        begin = ends[-1]
        last = bisect.bisect_right(totals, totals[begin] + most) - 1
        first = max(begin + 1, min(last, bisect.bisect_left(totals, totals[begin] + most // 2)))
        # Of places with equally few values the last one makes the largest part.
        ends.append(min(range(first, last + 1), key=lambda end: (crossing[end - 1], -end)))
    assert ends == sorted({*ends}), "a part has no equation"
    return [*ends[1:], len(main.equations)]


def _make_part(
    expressions: ExpressionList,
    equations: Sequence[Equation],
    takes: tuple[int, ...],
    gives: tuple[int, ...],
    own: range,
) -> ProgramPart:
    # Values are numbered anew, so that the parts of equal variables have one hash.
    local = {n: i for i, n in enumerate((*takes, *own))}
    assert len(local) == len(takes) + len(own), "a part takes what it makes"
    renumbered, digest = [], hashlib.sha256(repr(tuple(local[n] for n in gives)).encode())
    for equation in equations:
        operands = tuple(local.get(n, n) for n in equation.operands)
        sent = () if equation.message is None else equation.message.attributes
        attributes = [attribute.SerializeToString(deterministic=True) for attribute in sent]
        digest.update(repr((equation.name, operands, equation.results, attributes)).encode())
        renumbered.append(
            Equation(equation.name, equation.row, operands, equation.attributes, equation.results)
        )
    computation = Computation(len(takes), tuple(renumbered), tuple(local[n] for n in gives))
    return ProgramPart(_replace_main(expressions, computation), takes, gives, digest.digest())


def _replace_main(expressions: ExpressionList, computation: Computation) -> ExpressionList:
    return ExpressionList(
        (), computation, expressions.constants, expressions.threefry_partitionable
    )
