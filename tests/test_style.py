"""The figures of style stay within limits; ``python -m tests.tools.style --worst 20`` shows where they come from.

A change that needs a higher limit raises the limit here, with a reason in its commit. A change that beats a limit
lowers it.
"""

import functools
from collections.abc import Callable

import pytest

from tests.tools import style

LARGE_FUNCTIONS = {
    "models/cartpole/trainer.py main": "an example is read from top to bottom",
    "models/cartpole/trainer.py play": "the formulas of the algorithm, in their order",
    "models/mnist/trainer.py train": "an example is read from top to bottom",
    "runtime/wire/messages.py call_to_proto": "a table of the fields of a message",
}
"""Functions of more than 400 tokens, with the reason."""

LARGE_CLASSES = {
    "runtime/session/session.py Session": "the methods of TensorFlow's, with their examples",
    "runtime/wire/connection.py Connection": "the frame loop, whose states share the socket",
    "runtime/wire/channel.py Lane": "the exactly-once protocol of a client, in one place",
}
"""Classes of more than 400 lines, with the reason."""


@functools.cache
def core() -> style.Figures:
    return style.measure(style.product(without="harness/tf1"))


@functools.cache
def pages() -> str:
    return "\n".join(style.pages().values())


@functools.cache
def suite() -> style.TestFigures:
    return style.measure_tests()


def per_thousand(count: int, base: int) -> float:
    return 1000 * count / base


MOST: list[tuple[str, Callable[[], float], float]] = [
    ("tokens", lambda: core().tokens, 331_524),
    ("functions over 300 tokens", lambda: len(core().functions_over(tokens=300)), 13),
    ("functions over 15 branches", lambda: len(core().functions_over(branches=15)), 13),
    ("classes over 350 lines", lambda: len(core().classes_over(lines=350)), 4),
    ("classes over 20 attributes", lambda: len(core().classes_over(attributes=20)), 3),
    ("uses of Any", lambda: core().anys, 215),
    ("places that start a thread", lambda: core().threads, 17),
    ("docstrings that begin with What", lambda: len(core().questions), 0),
    ("pronouns in 1,000 words", lambda: per_thousand(core().pronouns, core().words), 58),
    (
        "trailing comments in 1,000 code lines",
        lambda: per_thousand(core().trailing, core().code_lines),
        2,
    ),
    (
        "functions of one word, %",
        lambda: core().one_word_functions / core().named_functions * 100,
        40,
    ),
    ("classes of one word, %", lambda: core().one_word_classes / len(core().classes) * 100, 20),
    ("words in a test's name", lambda: sum(suite().words.values()) / len(suite().words), 4.8),
    ("uses of monkeypatch", lambda: suite().patches, 100),
    ("words in the pages", lambda: style.page_words(pages()), 42_500),
    ("private attributes in tests", lambda: suite().private, 90),
    ("tests without a docstring", lambda: len(suite().words) - suite().documented, 0),
    ("tests with more than six words", lambda: sum(n > 6 for n in suite().words.values()), 0),
]

LEAST: list[tuple[str, Callable[[], float], float]] = [
    ("docstrings with an example", lambda: core().examples, 130),
    ("comments in 1,000 code lines", lambda: per_thousand(core().comments, core().code_lines), 60),
    ("asserts in 100,000 tokens", lambda: 100_000 * core().asserts / core().tokens, 100),
    (
        "code blocks in 1,000 words of the pages",
        lambda: per_thousand(style.page_blocks(pages()), style.page_words(pages())),
        5.5,
    ),
]


@pytest.mark.parametrize(("name", "figure", "most"), MOST, ids=[name for name, _, _ in MOST])
def test_figure_is_below_its_limit(name: str, figure: Callable[[], float], most: float) -> None:
    """A figure that should be small has not grown."""
    assert figure() <= most, name


@pytest.mark.parametrize(("name", "figure", "least"), LEAST, ids=[name for name, _, _ in LEAST])
def test_figure_is_above_its_limit(name: str, figure: Callable[[], float], least: float) -> None:
    """A figure that should be large has not shrunk."""
    assert figure() >= least, name


def test_large_functions_are_named() -> None:
    """A function of more than 400 tokens has its reason in this file, and none has more than 22
    branches.
    """
    assert without_lines(core().functions_over(tokens=400)) == LARGE_FUNCTIONS.keys()
    assert core().functions_over(branches=22) == []


def test_large_classes_are_named() -> None:
    """A class of more than 400 lines has its reason in this file, and none has more than 25
    attributes.
    """
    assert without_lines(core().classes_over(lines=400)) == LARGE_CLASSES.keys()
    assert core().classes_over(attributes=25) == []


def without_lines(places: list[str]) -> set[str]:
    """Returns places as file and name, since the line changes with every edit."""
    return {f"{place.partition(':')[0]} {place.rpartition(' ')[2]}" for place in places}


def test_script_counts_sizes_and_words() -> None:
    """The script counts large functions and pronouns."""
    source = '"""What it does."""\n\ndef work(x):\n    """Returns it."""\n    return ' + " + ".join(
        ["x"] * 200
    )
    figures = style.measure_text(source, "made/up.py")
    assert [without_lines(figures.functions_over(tokens=300))] == [{"made/up.py work"}]
    assert (figures.pronouns, figures.questions) == (3, ["made/up.py:1 module"])
