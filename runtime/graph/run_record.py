"""The graph's side of the run records: what the tasks that hold variables know of the training run."""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.graph.bodies import Host
from runtime.graph.graph import Tensor, get_default_graph
from runtime.graph.ops import as_tensor


def run_record(request: Any, name: str = "run_record") -> Tensor:
    """One exchange with the run record of the task that the current device scope names.

    The harness coordinates between-graph training with it; see ``harness.run_records`` for the requests.

    Args:
        request: scalar string tensor, or what makes one: a JSON object with ``"action"``.
        name: operation name.

    Returns:
        A scalar string tensor: the record after the request, as a JSON object.
    """
    op = get_default_graph().add_operation(
        "RunRecord", Host("run_record", {"variables": []}, True), [as_tensor(request)], [((), np.dtype(object))], name=name
    )
    return op.outputs[0]
