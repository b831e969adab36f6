"""Which version of Bellwether this is, and which versions it speaks to (docs/compatibility.md)."""

from __future__ import annotations

import functools
import re
from typing import Final

WIRE_VERSION: Final = 4
"""Of both planes. Another number is another wire: it changes with whatever a peer of the version before would not
understand, or would understand differently."""
_SAID = re.compile(r"(?P<wire>[0-9]{1,9}) (?P<release>[\w.+!-]{1,40})")


@functools.cache
def version() -> str:
    """Returns the installed version of Bellwether; "0+checkout" for sources without one."""
    from importlib import metadata

    try:
        return metadata.version("bellwether")
    except metadata.PackageNotFoundError:
        return "0+checkout"


def spoken() -> str:
    """Returns the versions that a client sends with each call of the control plane."""
    return f"{WIRE_VERSION} {version()}"


@functools.lru_cache(maxsize=16)
def why_not_understood(said: str) -> str:
    """Returns the reason to refuse a client that sends ``said``; "" for a client of this wire version.

    A client that sends nothing counts as one of this version: no released version is so old.
    """
    if not said:
        return ""
    found = _SAID.fullmatch(said)
    if found is not None and int(found["wire"]) == WIRE_VERSION:
        return ""
    theirs = f"Bellwether {found['release']} (wire version {found['wire']})" if found else "another version"
    return (
        f"this task runs Bellwether {version()} (wire version {WIRE_VERSION}) and its client {theirs}: install one "
        "version on all tasks of the cluster"
    )
