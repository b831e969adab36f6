"""The picture of a terminal in README: the reader's own experiment, which kills the ps of the minimal program.

python -m benchmarks.terminal docs/images/terminal.svg
"""

import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

from rich.console import Console
from rich.text import Text

COMMAND = "python -m harness.launch --ps=1 --workers=2 -- python -m models.mnist.minimal"


def main() -> None:
    """Runs the experiment, and draws what the program printed."""
    console = Console(record=True, width=124, file=io.StringIO())
    with tempfile.TemporaryDirectory() as logdir:
        options = f"--logdir={logdir} --train_steps=20000"
        command = f"{COMMAND} {options}".replace("python", sys.executable).split()
        console.print(
            Text(f"$ {COMMAND} --logdir=runs/minimal --train_steps=20000"), soft_wrap=True
        )
        target = ""
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as launcher:
            assert launcher.stdout is not None
            for line in launcher.stdout:
                console.print(Text(line.rstrip().replace(logdir, "runs/minimal")))
                if "--target=" in line:
                    target = line.partition("--target=")[2].split()[0]
                if target and "steps/s" in line:
                    pid = _find_ps(target)
                    console.print(Text(f"$ kill -9 {pid}    # the ps, from another terminal"))
                    os.kill(pid, signal.SIGKILL)
                    target = ""
    picture = console.export_svg(title="kill -9 of the ps")
    # No font is fetched from elsewhere.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    pathlib.Path(sys.argv[1]).write_text(picture)


def _find_ps(target: str) -> int:
    asked = [sys.executable, "-m", "harness.status", f"--target={target}", "--json"]
    tasks = json.loads(subprocess.run(asked, capture_output=True, text=True).stdout)["tasks"]
    return next(int(task["pid"]) for task in tasks if task["task"] == "/job:ps/task:0")


if __name__ == "__main__":
    main()
