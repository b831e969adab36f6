"""Spares Python's garbage collector the modules that a task imports: a third of the processor time of its imports.

``runtime/__init__.py`` imports this module first, and calls `resume` last. JAX and the modules
around it leave 200,000 objects that live as long as the process. The collector would walk through
them again and again while the modules are imported, and in each full collection of a training run.
So the collector pauses, and then passes over what is alive (`gc.freeze`; `gc.unfreeze` undoes
that).

Objects of an interactive session stay in the collector's sight: a model that its user drops later
must go.
"""

import gc
import sys

_was_enabled = gc.isenabled()
_jax_was_there = "jax" in sys.modules
gc.disable()


def resume() -> None:
    """Turns the collector on again, if it was on, and keeps it from what is alive now.

    Garbage of the program so far is collected first, since a frozen object is never freed by the
    collector.
    """
    if not hasattr(sys, "ps1"):
        if _jax_was_there:
            gc.collect()
        gc.freeze()
    if _was_enabled:
        gc.enable()
