"""Checks objects against the schemas of Kubernetes' custom resources, and more strictly than an API server does.

An API server drops a field that it does not know without a word; here it is a problem.
"""

import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

_DATA = pathlib.Path(__file__).parent / "data"
_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
    "number": (int, float),
}
_KNOWN = frozenset(
    """
    type properties required items additionalProperties enum default format pattern minimum maximum minLength maxLength
    minItems maxItems maxProperties nullable allOf anyOf oneOf not x-kubernetes-int-or-string x-kubernetes-list-type
    x-kubernetes-list-map-keys x-kubernetes-map-type x-kubernetes-preserve-unknown-fields x-kubernetes-validations
    """.split()
)


def load(name: str) -> dict[str, Any]:
    """A schema of the test data, with its source."""
    found: dict[str, Any] = json.loads((_DATA / f"{name}.json").read_text())
    return found


def problems(value: Any, schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """What is wrong with a value; expressions (CEL) of a schema are not looked at."""
    assert schema.keys() <= _KNOWN, schema.keys() - _KNOWN
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            yield f"{path}: {value!r} is no number and no text"
        elif isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
            yield f"{path}: {value!r} does not fit {schema['pattern']}"
        return
    kind = schema.get("type")
    if kind and (
        not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")
    ):
        yield f"{path}: {value!r} is no {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is none of {schema['enum']}"
    if isinstance(value, str):
        if not re.search(schema.get("pattern", ""), value):
            yield f"{path}: {value!r} does not fit {schema['pattern']}"
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
            yield f"{path}: {value!r} has a bad length"
    if isinstance(value, int | float) and not schema.get("minimum", value) <= value <= schema.get(
        "maximum", value
    ):
        yield f"{path}: {value!r} is out of range"
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{path}: {len(value)} items"
        keys = schema.get("x-kubernetes-list-map-keys")
        if keys:
            ids = [tuple(item.get(key) for key in keys) for item in value]
            if len(set(ids)) < len(ids):
                yield f"{path}: two items with the same {keys}"
        for number, item in enumerate(value):
            yield from problems(item, schema["items"], f"{path}[{number}]")
    if isinstance(value, dict):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties")
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{path}.{name} is missing"
        for name, part in value.items():
            if name in known:
                yield from problems(part, known[name], f"{path}.{name}")
            elif rest:
                yield from problems(part, rest, f"{path}.{name}")
            elif known or not (
                schema.get("x-kubernetes-preserve-unknown-fields") or path == ".metadata"
            ):
                yield f"{path}.{name} is not known"
