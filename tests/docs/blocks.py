"""The code blocks of the documentation, and how those in Python are run: ``python -m tests.docs.blocks docs/sync.md``.

Blocks of a page run from top to bottom in one namespace, in a process and a directory of their own,
with the names that tests/docs/scenes.py gives them. A block with a ``title="train.py"`` is a whole
program: test_blocks.py writes it to a file of that name and starts it. Comments right before a
block say more:

* ``<!-- fragment: why -->``: it is not run;
* ``<!-- needs: grain -->``: it is run where these packages are installed.
"""

import ast
import contextlib
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")])
_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
_MARK = re.compile(r"<!-- (?P<what>fragment|needs): (?P<why>.+?) -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: its page.
        line: where its code begins in the page, from 1.
        language: as it stands after the fence.
        title: name of the file that it is; empty of one that is part of a page.
        code: what is in it, without the indentation of the fence.
        fragment: why it is not run; empty where it is.
        needs: packages that it is run with.
    """

    page: pathlib.Path
    line: int
    language: str
    title: str
    code: str
    fragment: str
    needs: frozenset[str]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: pathlib.Path) -> Iterator[Block]:
    """The fenced blocks of a page, from top to bottom."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        language, _, rest = found["info"].partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        mark = _MARK.search(text, 0, found.start())
        said = {mark["what"]: mark["why"]} if mark else {}
        yield Block(
            page=page,
            line=text.count("\n", 0, found.start("code")) + 1,
            language=language,
            title=title[1] if title else "",
            code=textwrap.dedent(found["code"]),
            fragment=said.get("fragment", ""),
            needs=frozenset(filter(None, said.get("needs", "").replace(" ", "").split(","))),
        )


def run(page: pathlib.Path, have: frozenset[str]) -> int:
    """Runs the Python blocks of a page; returns how many.

    Args:
        page: the page.
        have: packages; a block that needs others is left out.
    """
    from tests.docs import scenes

    with contextlib.ExitStack() as stack:
        scene = scenes.SCENES.get(page.name, scenes.Scene)()
        stack.callback(scene.close)
        here = [block for block in blocks(page) if block.language == "python" and not block.title]
        ran = [block for block in here if not block.fragment and block.needs <= have]
        for block in ran:
            tree = ast.increment_lineno(
                ast.parse(scene.as_here(block.code), str(page)), block.line - 1
            )
            scene.before(block)
            exec(compile(tree, str(page), "exec"), scene.names)
            scene.after(block)
    return len(ran)


if __name__ == "__main__":
    print("blocks that ran:", run(pathlib.Path(sys.argv[1]).resolve(), frozenset(sys.argv[2:])))
