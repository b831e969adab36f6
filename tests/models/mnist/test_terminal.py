"""The picture of a terminal in README shows what the program prints."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT

LINES = (
    "ps/N | ps N serves at grpc://N.N.N.N:N",
    "ps/N | worker N joined",
    "launch | ps/N was killed by SIGKILL; restart N of N in N.N s",
    "worker/N | WARNING:absl:recovered within N.N s at step N: N steps are lost (step N was the last seen here)",
    "worker/N | training is over: step N, N.N steps/s; its checkpoints are in runs/minimal",
)
"""Lines of the experiment, with N for each number."""


def shown(picture: pathlib.Path) -> set[str]:
    """Returns the lines of a picture, with N for each number."""
    rows = re.findall(r"<text [^>]*>([^<]*)</text>", picture.read_text())
    words = (re.sub(r"\d+(?:,\d+)*", "N", row.replace("&#160;", " ")) for row in rows)
    return {" ".join(row.split()) for row in words}


@pytest.mark.nightly
def test_readme_shows_todays_lines(tmp_path: pathlib.Path) -> None:
    """The lines of the picture are those of a run today."""
    again = tmp_path / "again.svg"
    subprocess.run(
        [sys.executable, "-m", "benchmarks.terminal", str(again)], cwd=ROOT, check=True, timeout=250
    )
    stored = ROOT / "docs" / "images" / "terminal.svg"
    assert "images/terminal.svg" in (ROOT / "README.md").read_text()
    for picture in (stored, again):
        assert set(LINES) <= shown(picture), shown(picture)
