"""The books of a chaos run: what adds up, and what they notice when it does not."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chaos_ledger import OPENED, Entry, Restore, add_up, restores

BACK = "restored /x/4: back from step 8 to step 4, 4 steps are lost"
LATE = (
    "recovered within 1.00 s at step 9: the chief has replaced the values meanwhile, and its log "
    "says how many steps "
    "are lost (step 8 was the last seen here)"
)
RECOVERED = "recovered within 1.00 s at step 4: 4 steps are lost (step 8 was the last seen here)"


def ledger(*entries: tuple[str, object]) -> list[Entry]:
    """A ledger whose entries come one second after the other."""
    made = []
    for at, (what, value) in enumerate(entries):
        made.append(
            Entry(at, what, value) if isinstance(value, int) else Entry(at, what, text=str(value))
        )
    return made


def steps(*numbers: int) -> list[tuple[str, object]]:
    return [entry for number in numbers for entry in (("begin", ""), ("done", number))]


OPEN = ("log", OPENED)


def test_undisturbed_run_adds_up() -> None:
    """The books of an undisturbed run keep every step."""
    books = add_up([ledger(OPEN, *steps(1, 3, 4)), ledger(OPEN, *steps(2, 5))], 5)
    assert (books.done, books.unknown, books.kept, books.lost, books.wrong) == (5, 0, 5, 0, [])


def test_known_restore_adds_up() -> None:
    """A restore that the chief saw whole loses the steps that its log says."""
    chief = ledger(
        OPEN, *steps(*range(1, 9)), ("begin", ""), ("log", "recovering: x"), ("log", BACK), ("log", RECOVERED),
        ("done", 5), *steps(6),
    )  # fmt: skip
    books = add_up([chief], 6)
    assert (books.done, books.unknown, books.kept, books.lost, books.untold, books.wrong) == (
        10,
        1,
        6,
        4,
        0,
        [],
    )


def test_restore_without_global_step_counts() -> None:
    """Steps lost with the global step are counted from the ledgers."""
    on = BACK.replace(
        "back from step 8 to step 4, 4 steps are lost", "training goes on from step 4"
    )
    lost = [OPEN, *steps(*range(1, 9)), ("log", on), ("log", RECOVERED), *steps(5, 6)]
    books = add_up([ledger(*lost)], 6)
    assert (books.lost, books.untold, books.wrong) == (4, 0, [])
    late = [(what, LATE if text == RECOVERED else text) for what, text in lost[:-4]]
    books = add_up([ledger(*late, *steps(*range(5, 10)))], 9)
    assert (books.untold, books.wrong) == (0, [])
    silent = [entry for entry in lost if entry[1] != RECOVERED]
    # a new life of the worker: nobody knows what was lost
    silent.insert(silent.index(("log", on)) + 1, OPEN)
    books = add_up([ledger(*silent)], 6)
    assert (books.lost, books.untold, books.wrong) == (4, 4, [])


def test_slept_restores_lose_once() -> None:
    """Two restores that a worker slept through lose its steps once."""
    on = "restored /x/4: training goes on from step 4"
    books = add_up(
        [
            ledger(
                OPEN, *steps(*range(1, 9)), ("log", on), ("log", on), ("log", RECOVERED), *steps(5)
            )
        ],
        5,
    )
    assert (books.restores, books.lost, books.wrong) == (2, 4, [])


def test_wrong_books_are_noticed() -> None:
    """Steps that are repeated, missing or lost without a restore are noticed."""
    twice = add_up([ledger(OPEN, *steps(1, 2)), ledger(OPEN, *steps(2))], 2)
    assert any("counted twice" in wrong for wrong in twice.wrong)
    beyond = add_up([ledger(OPEN, *steps(1, 2, 3))], 2)
    assert any("step 3 was done, but 2 is logged" in wrong for wrong in beyond.wrong)
    nobodys = add_up([ledger(OPEN, *steps(1, 3))], 3)
    assert any("1 counted steps are of no worker" in wrong for wrong in nobodys.wrong)
    silently = add_up([ledger(OPEN, *steps(1, 2), ("log", RECOVERED), *steps(1, 2))], 2)
    assert any("without a restore" in wrong for wrong in silently.wrong)
    too_low = add_up(
        [ledger(OPEN, *steps(*range(1, 9)), ("log", BACK), ("log", RECOVERED), *steps(3, 5))], 5
    )
    assert any("done again after a restore" in wrong for wrong in too_low.wrong)


def test_first_initialisation_loses_no_step() -> None:
    """The first initialisation is no restore."""
    first, second = ("log", "chief: initialise: x"), ("log", "chief: initialise: y")
    assert restores([ledger(first, OPEN, *steps(1), second)]) == [Restore(4, 0, None)]


@given(
    st.floats(0, 1e9),
    st.sampled_from(["begin", "done", "log"]),
    st.integers(0, 2**40),
    st.text("abc XYZ0-9:()", max_size=40),
)
def test_lines_survive_writing_and_reading(at: float, what: str, step: int, text: str) -> None:
    """An entry survives writing and reading."""
    entry = Entry(round(at, 6), what, step if what == "done" else 0, text if what == "log" else "")
    assert Entry.parse(entry.line()) == entry


def test_cut_line_is_no_entry() -> None:
    """A line that a kill has cut off is no entry."""
    assert [Entry.parse(line) for line in ("", "D", "D 12.5", "D 12.5 x", "B", "Q 1 2")] == [
        None
    ] * 6
