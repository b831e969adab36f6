"""The version of Bellwether, and the versions that it understands (docs/compatibility.md)."""

import functools
import re

WIRE_VERSION = 4
"""The version of both planes.

It changes with whatever a peer of the version before would not understand, or would
understand differently.
"""
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
    """Returns the versions for the metadata of a control plane call."""
    return f"{WIRE_VERSION} {version()}"


@functools.lru_cache(maxsize=16)
def why_not_understood(said: str) -> str:
    """Returns the reason to refuse a client that sends ``said``.

    Returns "" for a client of this wire version. A client without a version counts as such a
    client: no released version is so old.

    Examples:
        >>> why_not_understood(spoken())
        ''
    """
    if not said:
        return ""
    found = _SAID.fullmatch(said)
    if found is not None and int(found["wire"]) == WIRE_VERSION:
        return ""
    theirs = (
        f"Bellwether {found['release']} (wire version {found['wire']})"
        if found
        else "another version"
    )
    return (
        f"this task runs Bellwether {version()} (wire version {WIRE_VERSION}) and its client "
        f"{theirs}: install one "
        "version on all tasks of the cluster"
    )
