"""The code blocks of the pages run: those of a page in their order, and the whole programs under the launcher."""

import ast
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

import harness
from tests.docs.blocks import PAGES, ROOT, Block, blocks
from tests.docs.commands import commands

pytestmark = pytest.mark.chaos

LANGUAGES = {"python", "console", "sh", "text", "json", "yaml"}
ELSEWHERE = {"README.md": "tests/models/mnist/test_minimal.py runs its program and its commands"}
"""Pages whose blocks another test runs."""
BLOCKS = [block for page in PAGES if page.name not in ELSEWHERE for block in blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
SNIPPETS = sorted(
    {
        (block.page, tuple(sorted(block.needs)))
        for block in PYTHON
        if not block.title and not block.fragment
    }
)
"""Pages, each once for every set of packages that some of its blocks need."""
FILES = [block for block in PYTHON if block.title]
PROGRAMS = [block for block in FILES if "__main__" in block.code]
"""Files of a page that are started; the others are imported by them."""


def test_every_block_names_its_language() -> None:
    """Every block of a page names its language."""
    assert [
        f"{b}: {b.language}" for page in PAGES for b in blocks(page) if b.language not in LANGUAGES
    ] == []


def test_python_is_fenced() -> None:
    """Python on a page stands in a fenced block."""
    found = []
    for page in PAGES:
        lines = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for code in re.findall(r"(?:^\n)((?:^(?: {4}.*)?\n)+)", lines, re.MULTILINE):
            try:
                compile(textwrap.dedent(code), "block", "exec")
            except SyntaxError:
                continue
            if re.search(r"\b(?:rt|harness|tf|jax|optax)\.\w", code):
                found.append(f"{page.name}: {code}")
    assert found == []


def test_fragment_has_a_reason() -> None:
    """A fragment is Python and has a reason."""
    compiled = [compile(block.code, str(block), "exec") for block in PYTHON]
    assert len(compiled) > 20
    assert [
        str(block) for block in PYTHON if block.fragment and len(block.fragment.split()) < 3
    ] == []


@pytest.mark.parametrize(
    "block", [b for b in PYTHON if b.fragment.startswith("lines of ")], ids=str
)
def test_quoted_lines_are_in_program(block: Block) -> None:
    """Lines that a page quotes from a program are in the program."""
    program = (ROOT / block.fragment.removeprefix("lines of ")).read_text()
    assert statements(block.code) <= statements(program)


def statements(code: str) -> set[str]:
    return {ast.unparse(node) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.stmt)}


def test_commands_name_existing_files() -> None:
    """The commands of the pages name modules and files that exist."""
    shell = "\n".join(block.code for block in BLOCKS if block.language in {"sh", "console"})
    modules = set(re.findall(r"-m ((?:harness|models|benchmarks|runtime)[\w.]*)", shell))
    files = set(re.findall(r"configs/[\w./-]*\w", shell))
    assert len(modules) > 5 and files
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    assert [name for name in files if not (ROOT / name).exists()] == []


def without(needs: tuple[str, ...]) -> None:
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize(
    ("page", "needs"), SNIPPETS, ids=["-".join([page.stem, *needs]) for page, needs in SNIPPETS]
)
def test_blocks_of_a_page_run(
    page: pathlib.Path, needs: tuple[str, ...], tmp_path: pathlib.Path
) -> None:
    """The Python blocks of a page run in their order."""
    without(needs)
    done = python("-m", "tests.docs.blocks", str(page), *needs, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    assert re.search(r"^blocks that ran: [1-9]", done.stdout, re.MULTILINE)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "block", [block for block in PROGRAMS if block.page.name == "models.md"], ids=str
)
def test_program_of_page_trains(block: Block, tmp_path: pathlib.Path) -> None:
    """A whole program of a page trains and leaves a checkpoint."""
    without(tuple(block.needs))
    save_files(block.page, tmp_path)
    assert 0.87 < accuracy(run(block, tmp_path)) <= 1
    library = block.title.removeprefix("train_").removesuffix(".py")
    assert harness.latest_checkpoint(str(tmp_path / "runs" / library))


@pytest.mark.nightly
def test_learner_learns_from_actors(tmp_path: pathlib.Path) -> None:
    """The learner of the page on reinforcement learning finds the best move, and its actors end."""
    (block,) = (block for block in PROGRAMS if block.page.name == "reinforcement.md")
    save_files(block.page, tmp_path)
    assert "best move 9" in run(block, tmp_path)


@pytest.mark.nightly
def test_restarted_program_continues(tmp_path: pathlib.Path) -> None:
    """A program that is started again continues from its checkpoint."""
    (block,) = (block for block in PROGRAMS if block.title == "train_plain.py")
    save_files(block.page, tmp_path)
    found = accuracy(run(block, tmp_path))
    step = harness.load_variable(str(tmp_path / "runs/plain"), "global_step")
    # The other worker's last steps may come after the chief's test, and are in the checkpoint.
    assert abs(accuracy(run(block, tmp_path)) - found) < 0.03
    assert harness.load_variable(str(tmp_path / "runs/plain"), "global_step") == step >= 600


@pytest.mark.nightly
@pytest.mark.parametrize(
    "block", [block for block in PROGRAMS if block.page.name == "data.md"], ids=str
)
def test_program_continues_its_data(block: Block, tmp_path: pathlib.Path) -> None:
    """A program that is started again continues its data."""
    without(tuple(block.needs))
    save_files(block.page, tmp_path)
    first, second = run(block, tmp_path), run(block, tmp_path)
    begun, again = begins(first), begins(second)
    assert len(begun) == len(again) == 2
    assert begun["0"] == begun["1"]  # the beginning
    # Worker 1 had left before the last checkpoint; on a busy machine one of them comes when nothing
    # is left to do.
    assert again["0"] != begun["0"] or again["1"] != begun["1"]
    assert 0.87 < accuracy(second) <= 1


def save_files(page: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes the files of a page into a folder, as its reader does."""
    for block in FILES:
        if block.page == page:
            (folder / block.title).write_text(block.code)


def begins(output: str) -> dict[str, str]:
    """Where the workers say that they begin, by their numbers."""
    return dict(re.findall(r"worker (\d) begins at (.+)", output))


def run(block: Block, folder: pathlib.Path) -> str:
    """What a whole program of a page says that is started by the command of its page."""
    (command,) = (commands(b)[0] for b in blocks(block.page) if b.language == "sh")
    *launch, program = command.split()
    assert launch[0] == "python" and program in {b.title for b in PROGRAMS}
    done = python(*launch[1:], block.title, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout


def accuracy(output: str) -> float:
    """What a program says at its end that it has reached."""
    (found,) = re.findall(r"accuracy ([01]\.\d+)", output)
    return float(found)


def python(*arguments: str, cwd: pathlib.Path) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=280
    )
