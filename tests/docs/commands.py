"""The commands of the documentation: lines of its blocks for a shell, and the flags that they give to our programs."""

import pathlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from tests.docs.blocks import PAGES, ROOT, Block, blocks

SHELL = ("sh", "console")
TRAINER = "models.mnist.trainer"
_PROMPT = re.compile(r"^(?:\w+)?\$ +")
_COMMAND = re.compile(r"`([^`\n]*python -m (?:harness|models|runtime|benchmarks|tests)\.[^`\n]*)`")
_BLOCKS = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_ENDS = {"|", ">", "&&", ";", "&"}


@dataclass(frozen=True)
class Flags:
    """What a command of a page gives to a program of ours.

    Attributes:
        where: page and line.
        module: the program.
        names: its flags, without dashes and values.
    """

    where: str
    module: str
    names: tuple[str, ...]


def shell_blocks() -> list[Block]:
    """The blocks of all pages that are for a shell."""
    return [block for page in PAGES for block in blocks(page) if block.language in SHELL]


def script(block: Block) -> str:
    """What a shell is given: a block without prompts, and without what the commands write."""
    if block.language == "sh":
        return block.code
    lines = block.code.splitlines()
    return "".join(f"{_PROMPT.sub('', line)}\n" for line in lines if _PROMPT.match(line))


def commands(block: Block) -> list[str]:
    """The commands of a block, each in one line and without its comment."""
    whole = script(block).replace("\\\n", " ")
    return [line for line in whole.splitlines() if _words(line)]


def shown_commands(block: Block) -> list[str]:
    """Returns the commands of a block of text, which is not run, without the words beside them."""
    lines = block.code.splitlines() if block.language == "text" else []
    return [
        re.split(r"  +", line)[0]
        for line in lines
        if re.match(r"(?:[A-Z_]+=\S+ )?(?:python -m|make) ", line)
    ]


def given_flags() -> Iterator[Flags]:
    """What all pages give to our programs: in blocks, in lines that only show flags, and within sentences."""
    for page in PAGES:
        for block in blocks(page):
            for line in commands(block) if block.language in SHELL else ():
                yield from _of_command(str(block), line)
            for line in shown_commands(block):
                yield from _of_command(str(block), line)
            if block.language == "text" and block.code.startswith("--"):
                for line in block.code.splitlines():
                    yield Flags(str(block), TRAINER, _names(_words(line)))
        text = re.sub(
            r"^( *)```.*?^\1```$",
            lambda found: "\n" * found[0].count("\n"),
            page.read_text(),
            flags=re.M | re.S,
        )
        for found in _COMMAND.finditer(text):
            where = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}"
            yield from _of_command(where, found[1])


def _of_command(where: str, line: str) -> Iterator[Flags]:
    words = _words(line)
    for number, word in enumerate(words):
        rest = words[number + 1 :]
        if pathlib.PurePath(word).name == "python" and rest[:1] == ["-m"]:
            yield Flags(where, rest[1], _names(rest[2:]))
        elif word.endswith(".sbatch"):  # what follows goes to the trainer
            yield Flags(where, TRAINER, _names(rest))


def _words(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def _names(words: list[str]) -> tuple[str, ...]:
    """The flags among the arguments of one program; what stands after ``--`` is for another."""
    own = words[
        : next(
            (number for number, word in enumerate(words) if word in _ENDS or word == "--"),
            len(words),
        )
    ]
    return tuple(word.lstrip("-").partition("=")[0] for word in own if re.match(r"--?[a-z]", word))
