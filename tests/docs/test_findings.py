"""The findings of the security review in docs/security.md: each names tests that are there, or says that it is open."""

import ast
import re

from tests.kit.processes import ROOT

FINDINGS = 43


def rows() -> list[list[str]]:
    """The cells of the table's rows."""
    page = (ROOT / "docs" / "security.md").read_text()
    part = page.partition("## Findings of the review")[2].partition("\n## ")[0]
    found = [[cell.strip() for cell in line.strip("|").split(" |")] for line in part.splitlines()]
    return [cells for cells in found if cells[0].isdigit()]


def names(file: str) -> set[str]:
    """The tests of a file."""
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_finding_names_tests_that_are_there_or_is_said_to_be_open() -> None:
    table = rows()
    assert [int(cells[0]) for cells in table] == list(range(1, FINDINGS + 1))
    for number, finding, remains, closed_by, tests in table:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", tests)
        assert finding and closed_by, number
        assert named or (closed_by == "not closed" and remains), f"finding {number} has no test"
        missing = [f"{file}::{name}" for file, name in named if name not in names(file)]
        assert not missing, f"finding {number}: {missing}"
