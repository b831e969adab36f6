"""Pages lead where they say, are short, and are made of short sentences."""

import pathlib
import re
import statistics
from collections.abc import Iterator

import pytest

from tests.docs.blocks import PAGES, ROOT

GENERATED = {"tf1_names.md"}
WRITTEN = [page for page in PAGES if page.name not in GENERATED | {"CHANGELOG.md"}]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PAGE_WORDS = 2_500
SENTENCE_WORDS = 17.5
_FENCES = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
_PATH = re.compile(r"`((?:runtime|harness|models|benchmarks|tests|configs|protos)/[\w./-]+)`")


def prose(page: pathlib.Path) -> str:
    """Returns the text of a page without its blocks of code."""
    return _FENCES.sub("", page.read_text(encoding="utf-8"))


def anchors(page: pathlib.Path) -> set[str]:
    """Returns the places of a page that links can name, as the site and GitHub make them from headings."""
    heads = [
        re.sub(r"[^\w\s-]", "", head.lower()).strip()
        for head in re.findall(r"^#+ (.+)$", prose(page), re.M)
    ]
    return {re.sub(r"\s+", "-", head) for head in heads}


def sentences(text: str) -> Iterator[int]:
    """Returns the number of words of each sentence outside of tables, headings and code."""
    text = re.sub(r"`[^`\n]*`", "x", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))
    lines = "\n".join(
        line for line in text.splitlines() if not re.match(r"\s*(\||#|<|!| {4})", line)
    )
    for part in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\"(])|\n\s*\n|\n\s*[-*] ", lines):
        count = len(re.findall(r"[A-Za-z']+", part))
        if count > 2:
            yield count


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    """Each link names a file that is there, and a heading of that page."""
    lost = []
    for path, anchor in _LINK.findall(prose(page)):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target)
        ):
            lost.append(f"{path}#{anchor}")
    assert lost == []


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_named_files_are_there(page: pathlib.Path) -> None:
    """Each path of the repository that a page names exists."""
    assert [
        path
        for path in _PATH.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / path).exists()
    ] == []


def test_newcomers_table_names_classes() -> None:
    """CONTRIBUTING names files with the classes that they define, and tests that are there."""
    rows = re.findall(
        r"^\| (`\w+/.*?) \| .*? \| (.*?) \| `make test TESTS=(.*?)` \|$", CONTRIBUTING, re.MULTILINE
    )
    assert len(rows) > 10
    for files, classes, tests in rows:
        source = "\n".join(
            (ROOT / file).read_text(encoding="utf-8") for file in re.findall(r"`(.*?)`", files)
        )
        defined = set(re.findall(r"^class (\w+)", source, re.MULTILINE))
        assert set(re.findall(r"`(.*?)`", classes)) <= defined and (ROOT / tests).exists()


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_pages_are_short(page: pathlib.Path) -> None:
    """A page has 2,500 words at most, and sentences that are read once."""
    assert len(page.read_text(encoding="utf-8").split()) <= PAGE_WORDS
    assert statistics.mean(sentences(prose(page))) <= SENTENCE_WORDS


def test_programs_of_a_page_save_apart() -> None:
    """The programs of one page, and the notebooks, have log directories of their own."""
    for name, programs in (("models.md", 5), ("data.md", 4)):
        directories = re.findall(r'\btrain\(me, "(runs/\w+)"', (ROOT / "docs" / name).read_text())
        assert len(set(directories)) == len(directories) == programs
    for notebook in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        assert 'logdir=\\"' not in notebook.read_text()
