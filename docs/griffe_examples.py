"""An extension of Griffe for the site: an ``Example:`` of a docstring is shown as code, as ``Examples:`` would be."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the sections, as Griffe knows only the plural."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Renames the section of one object."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
