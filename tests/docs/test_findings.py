"""The findings of the security reviews in docs/findings.md: each names tests that are there, or is said to be open."""

import ast
import re

from tests.kit.processes import ROOT

FINDINGS = [
    *map(str, range(1, 44)),
    "A1",
    "A2",
    "A3",
    "A4",
    *(f"B{n}" for n in range(1, 6)),
    *(f"C{n}" for n in range(1, 7)),
]


def rows() -> list[list[str]]:
    """The cells of the table's rows."""
    page = (ROOT / "docs" / "findings.md").read_text()
    part = page.partition("## Findings of the reviews")[2].partition("\n## ")[0]
    found = [[cell.strip() for cell in line.strip("|").split(" |")] for line in part.splitlines()]
    return [cells for cells in found if cells[0] in FINDINGS]


def names(file: str) -> set[str]:
    """The tests of a file."""
    tree = ast.parse((ROOT / file).read_text())
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_findings_name_existing_tests() -> None:
    """Every finding names tests that exist or is said to be open."""
    table = rows()
    assert [cells[0] for cells in table] == FINDINGS
    for number, finding, state, tests in table:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", tests)
        assert finding and re.fullmatch("open|closed|gone: .+|(partly|open): .+", state), number
        assert named or state.startswith(("open", "gone")), f"finding {number} has no test"
        missing = [f"{file}::{name}" for file, name in named if name not in names(file)]
        assert not missing, f"finding {number}: {missing}"
