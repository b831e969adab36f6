"""Ray as the engine: places ps and workers on the nodes of a Ray cluster, and starts those again that die.

    import harness
    import harness.ray

    def train():
        with harness.join_cluster() as me:  # a ps goes no further
            ...

    harness.ray.run(train, ps=1, workers=2, resources={"worker": {"CPU": 2, "GPU": 1}})

Needs PyPI's `ray`: ``pip install ray``. docs/ray.md says what happens when something dies.
"""

import importlib.util

if importlib.util.find_spec("ray") is None:
    raise ImportError("harness.ray needs the package 'ray': pip install ray")

from harness.ray.driver import TaskFailedError as TaskFailedError
from harness.ray.driver import run as run

__all__ = ["TaskFailedError", "run"]
