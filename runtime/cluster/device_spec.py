"""Device names: their spellings, their parts, and the completion of one name by another."""

import functools
import re
from dataclasses import dataclass, replace
from typing import Any

from runtime.errors import InvalidArgumentError

SHORT_TYPES = frozenset({"CPU", "GPU", "TPU"})
"""Device types with a short spelling: "/gpu:0" for "/device:GPU:0"."""


@dataclass(frozen=True)
class DeviceSpec:
    """A device name in parts; None in a part means any.

    Attributes:
        job: name of the job, such as "worker".
        replica: 0 or None; a part of names from TF1.
        task: index in the job.
        device_type: "CPU", "GPU" ... (made upper case).
        device_index: number among the task's devices of that type.

    Raises:
        InvalidArgumentError: A part is invalid in a device name, or an index has no type.
    """

    job: str | None = None
    replica: int | None = None
    task: int | None = None
    device_type: str | None = None
    device_index: int | None = None

    def __post_init__(self) -> None:
        """Checks the parts."""
        if self.device_type is not None:
            object.__setattr__(self, "device_type", self.device_type.upper())
        for part, text, pattern in (
            ("job", self.job, r"[A-Za-z_][A-Za-z0-9_.-]*"),
            ("device type", self.device_type, r"[A-Z][A-Z0-9_]*"),
        ):
            if text is not None and not re.fullmatch(pattern, text):
                raise InvalidArgumentError(f"bad {part} {text!r} in a device name")
        for part, number in (("replica", self.replica), ("task", self.task), ("device index", self.device_index)):
            if number is not None and number < 0:
                raise InvalidArgumentError(f"bad {part} {number} in a device name: it must not be negative")
        if self.device_index is not None and self.device_type is None:
            raise InvalidArgumentError(f"device index {self.device_index} needs a device type")

    @staticmethod
    def parse(name: str) -> "DeviceSpec":
        """Reads a device name in any spelling.

            /job:worker/replica:0/task:1/device:GPU:0    /job:worker/task:1/gpu:0    /job:ps    /cpu    /device:CPU:*

        Raises:
            InvalidArgumentError: The text is not a device name; the error names the part.
        """
        return _parse(name)

    def to_string(self) -> str:
        """Returns the short form, '/job:worker/task:1/cpu:0'; empty without parts."""
        return self._format(short=True)

    def full_string(self) -> str:
        """Returns the full form, '/job:worker/replica:0/task:1/device:CPU:0', without parts that are not set."""
        return replace(self, replica=self.replica or 0)._format(short=False) if self.job else self._format(short=False)

    def merge(self, inner: "DeviceSpec") -> "DeviceSpec":
        """Returns the parts of `inner`, completed by the parts of this spec.

        >>> str(DeviceSpec.parse("/job:ps/task:1").merge(DeviceSpec.parse("/task:0/cpu:0")))
        '/job:ps/task:0/cpu:0'
        """
        if inner == ANYWHERE:
            return self
        return replace(self, **{part: value for part, value in vars(inner).items() if value is not None})

    def __str__(self) -> str:
        """Returns the short form."""
        return self.to_string()

    def _format(self, short: bool) -> str:
        parts = [("job", self.job), ("replica", self.replica), ("task", self.task)]
        name = "".join(f"/{part}:{value}" for part, value in parts if value is not None)
        if self.device_type is not None:
            kind = (
                self.device_type.lower() if short and self.device_type in SHORT_TYPES else f"device:{self.device_type}"
            )
            name += f"/{kind}:{'*' if self.device_index is None else self.device_index}"
        return name


ANYWHERE = DeviceSpec()
"""The device name without parts."""


@functools.lru_cache(maxsize=4096)
def _parse(name: str) -> DeviceSpec:
    fields: dict[str, Any] = {}
    for part in filter(None, name.split("/")):
        key, *values = part.split(":")
        if key in ("job", "replica", "task") and len(values) == 1:
            found: dict[str, Any] = {key: values[0] if key == "job" else _number(values[0], part, name)}
            if values[0] == "*":
                continue
        elif key == "device" and len(values) in (1, 2):
            found = {"device_type": values[0], "device_index": _number(values[1], part, name) if values[1:] else None}
        elif key.upper() in SHORT_TYPES and len(values) <= 1:
            found = {"device_type": key, "device_index": _number(values[0], part, name) if values else None}
        else:
            raise InvalidArgumentError(
                f"cannot read {part!r} in device {name!r}: expected parts such as "
                "/job:worker, /task:0, /cpu:0 or /device:GPU:0"
            )
        if fields.keys() & found.keys():
            raise InvalidArgumentError(f"device {name!r} says {key!r} twice")
        fields |= found
    try:
        return DeviceSpec(**fields)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{error.message} {name!r}") from None


def _number(text: str, part: str, name: str) -> int | None:
    if text == "*":
        return None
    if not (text.isascii() and text.isdigit()):
        raise InvalidArgumentError(f"{part!r} in device {name!r} needs a number or '*'")
    return int(text)
