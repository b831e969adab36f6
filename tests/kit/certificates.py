"""Certificates for tests, made as a user makes them: by a CA of their own."""

import datetime
import os
import pathlib
from collections.abc import Sequence

from harness.certs import CA

HERE = ("127.0.0.1", "localhost")
"""The names of a host that is this machine, as tests know it."""


def write(
    directory: pathlib.Path, name: str, authority: CA, pair: tuple[bytes, bytes]
) -> pathlib.Path:
    """Puts a key and a certificate, and the CA's, into a directory as NAME.key, NAME.pem and ca.pem; gives it.

    Each file is replaced as a whole, one after the other.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    for ending, content in (
        (f"{name}.key", pair[0]),
        (f"{name}.pem", pair[1]),
        ("ca.pem", authority.pem()[1]),
    ):
        fresh = directory / f".{ending}"
        fresh.touch(mode=0o600)
        fresh.write_bytes(content)
        os.replace(fresh, directory / ending)
    return directory


def pair_of(
    authority: CA,
    names: Sequence[str] = HERE,
    begins: float = -3600.0,
    ends: float = 86400.0,
    role: str = "",
) -> tuple[bytes, bytes]:
    """Returns a key and its certificate as PEM. The times are seconds from now."""
    now = datetime.datetime.now(datetime.UTC)
    begin, end = now + datetime.timedelta(seconds=begins), now + datetime.timedelta(seconds=ends)
    return authority.issue(names, end, begin, role)


def make(
    directory: pathlib.Path,
    authority: CA | None = None,
    names: Sequence[str] = HERE,
    begins: float = -3600.0,
    ends: float = 86400.0,
    role: str = "",
) -> pathlib.Path:
    """Makes a directory with one certificate, by a new CA unless a CA is given."""
    authority = authority or CA.make()
    return write(directory, "here", authority, pair_of(authority, names, begins, ends, role))
