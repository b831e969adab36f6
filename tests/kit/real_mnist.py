"""The real MNIST files, for tests that need them: those of `MNIST_DIR`, or those that `make mnist` has downloaded."""

import os

import pooch
import pytest

from models.mnist.files import SHA256


def _directory() -> str:
    downloaded = pooch.os_cache("bellwether") / "mnist"
    whole = all((downloaded / name).is_file() for name in SHA256)
    told = os.environ.get("MNIST_DIR") or (downloaded if whole else "")
    return os.path.realpath(told) if told else ""


DIRECTORY = _directory()
"""Where they are; empty when they are nowhere."""
ENVIRON = {"MNIST_DIR": DIRECTORY} if DIRECTORY else {}
"""What tells the trainer, also one that runs as another user."""
NONE_HERE = "" if DIRECTORY else "no MNIST files: set MNIST_DIR, or let `make mnist` download them"
needed = pytest.mark.skipif(not DIRECTORY, reason=NONE_HERE)
