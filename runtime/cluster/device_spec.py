"""Device names: their spellings, their parts, and the completion of one name by another."""

import functools
import re
from dataclasses import dataclass, replace
from typing import Any

from runtime.errors import InvalidArgumentError

SHORT_TYPES = frozenset({"CPU", "GPU", "TPU"})
"""Device types with a short spelling: "/gpu:0" for "/device:GPU:0"."""
MESH = "MESH"
"""Device type of meshes, whose numbers ``runtime.graph.mesh`` keeps."""


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
        # Names compare by text, so one type needs one spelling.
        if self.device_type is not None:
            object.__setattr__(self, "device_type", self.device_type.upper())
        for part, text, pattern in (
            ("job", self.job, r"[A-Za-z_][A-Za-z0-9_.-]*"),
            ("device type", self.device_type, r"[A-Z][A-Z0-9_]*"),
        ):
            if text is not None and not re.fullmatch(pattern, text):
                raise InvalidArgumentError(f"bad {part} {text!r} in a device name")
        for part, number in (
            ("replica", self.replica),
            ("task", self.task),
            ("device index", self.device_index),
        ):
            if number is not None and number < 0:
                raise InvalidArgumentError(
                    f"bad {part} {number} in a device name: it must not be negative"
                )
        # An index counts the devices of one type, so an index alone names no device.
        if self.device_index is not None and self.device_type is None:
            raise InvalidArgumentError(f"device index {self.device_index} needs a device type")

    @staticmethod
    def parse(name: str) -> "DeviceSpec":
        """Reads a device name in any spelling.

            /job:worker/replica:0/task:1/device:GPU:0    /job:worker/task:1/gpu:0
            /job:ps    /cpu    /device:CPU:*

        Raises:
            InvalidArgumentError: The text is not a device name; the error names the part.
        """
        return _parse_name(name)

    from_string = parse
    """TF1's name of ``parse``."""

    def to_string(self) -> str:
        """Returns the short form, '/job:worker/task:1/cpu:0'; empty without parts."""
        parts = (("job", self.job), ("replica", self.replica), ("task", self.task))
        name = "".join(f"/{part}:{value}" for part, value in parts if value is not None)
        if self.device_type is not None:
            kind = (
                self.device_type.lower()
                if self.device_type in SHORT_TYPES
                else f"device:{self.device_type}"
            )
            name += f"/{kind}:{'*' if self.device_index is None else self.device_index}"
        return name

    def merge(self, inner: "DeviceSpec") -> "DeviceSpec":
        """Returns the parts of `inner`, completed by the parts of this spec.

        >>> str(DeviceSpec.parse("/job:ps/task:1").merge(DeviceSpec.parse("/task:0/cpu:0")))
        '/job:ps/task:0/cpu:0'
        """
        # Most operations name no device of their own, so the common case makes no new object.
        if inner == ANYWHERE:
            return self
        outer = self
        # A mesh is of one task, and an operation that is sent elsewhere leaves the mesh.
        if self.device_type == MESH and inner.job not in (None, self.job):
            outer = replace(self, device_type=None, device_index=None)
        return replace(
            outer, **{part: value for part, value in vars(inner).items() if value is not None}
        )

    def __str__(self) -> str:
        """Returns the short form."""
        return self.to_string()


ANYWHERE = DeviceSpec()
"""The device name without parts."""


@functools.lru_cache(maxsize=4096)
def _parse_name(name: str) -> DeviceSpec:
    found: dict[str, str] = {}
    for part in filter(None, name.split("/")):
        key, _, value = part.partition(":")
        # TF1 writes "/gpu:0" and "/device:GPU:0" for the same device.
        is_device = key == "device" or key.upper() in SHORT_TYPES
        if key == "device":
            key, _, value = value.partition(":")
        if (
            not key
            or ":" in value
            or not (is_device or (key in ("job", "replica", "task") and value))
        ):
            raise InvalidArgumentError(
                f"cannot read {part!r} in device {name!r}: expected parts such as "
                "/job:worker, /task:0, /cpu:0 or /device:GPU:0"
            )
        parts = {"device_type": key, "device_index": value} if is_device else {key: value}
        # The last of two parts would win silently, and the first may be the one that was meant.
        if found.keys() & parts.keys():
            raise InvalidArgumentError(f"device {name!r} says {key!r} twice")
        found |= parts
    fields: dict[str, Any] = {}
    for field, text in found.items():
        # "*" stands for any, as a missing part does.
        if text in ("", "*"):
            continue
        if field in ("job", "device_type"):
            fields[field] = text
        # `isdigit` alone accepts digits of other scripts, which are a mistake here.
        elif text.isascii() and text.isdigit():
            fields[field] = int(text)
        else:
            raise InvalidArgumentError(f"{text!r} in device {name!r} needs a number or '*'")
    try:
        return DeviceSpec(**fields)
    # The error of a part does not know the whole name.
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{error.message} {name!r}") from None
