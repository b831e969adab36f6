r"""Prints a launch file: `python -m harness.manifests --for=jobset --ps=2 --workers=8 --model_mb=400 > job.yaml`.

What it asks for follows from the formulas of docs/memory.md and docs/scaling.md. After -- stands
the command of every task, by default the MNIST trainer. docs/kubernetes.md walks through it.
"""

import re
import sys
from collections.abc import Sequence

from absl import app, flags

from harness import exit_codes
from harness.manifests.render import ENGINES, render
from harness.manifests.request import TRAINER, ClusterRequest

_FOR = flags.DEFINE_enum(
    "for", None, ENGINES, "The engine that is to start the cluster.", required=True
)
_PS = flags.DEFINE_integer("ps", 1, "Number of ps tasks.", lower_bound=1)
_WORKERS = flags.DEFINE_integer(
    "workers", 2, "Number of tasks that train, the chief among them.", lower_bound=1
)
_EVALUATORS = flags.DEFINE_integer(
    "evaluators", 0, "Number of evaluators.", lower_bound=0, upper_bound=1
)
_ELASTIC = flags.DEFINE_bool(
    "elastic",
    False,
    "Workers come and go: their number may be changed while they train. For jobset and tfjob.",
)
_GPUS = flags.DEFINE_integer(
    "gpus", 0, "GPUs for each worker; a ps and an evaluator have none.", lower_bound=0
)
_MODEL_MB = flags.DEFINE_float(
    "model_mb", 1.0, "Size of all trained variables, in 10^6 bytes.", lower_bound=0.0
)
_SLOTS = flags.DEFINE_float(
    "slots", 2.0, "Optimizer slots for each variable: 0 SGD, 1 momentum, 2 Adam.", lower_bound=0.0
)
_STEP_MS = flags.DEFINE_float(
    "step_ms", 100.0, "A worker's computation in a step, in ms.", lower_bound=0.0
)
_NETWORK = flags.DEFINE_float(
    "network_gbit", 10.0, "Every host's network, in Gbit/s.", lower_bound=0.001
)
_NAME = flags.DEFINE_string("name", "bellwether", "Name of the job; a DNS label.")
_IMAGE = flags.DEFINE_string(
    "image", "bellwether:latest", "Image of the containers; configs/docker makes one."
)
_PS_IMAGE = flags.DEFINE_string(
    "ps_image", None, "Image of the ps, which need no CUDA; that of the others by default."
)
flags.register_validator(  # type: ignore[no-untyped-call]
    "name",
    lambda name: re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name),
    "give a DNS label of 40 characters",
)


def main(argv: Sequence[str]) -> int:
    """Prints the launch file that the flags describe; returns the exit code."""
    try:
        request = ClusterRequest(
            ps=_PS.value,
            workers=_WORKERS.value,
            model_bytes=_MODEL_MB.value * 1e6,
            name=_NAME.value,
            image=_IMAGE.value,
            ps_image=_PS_IMAGE.value or _IMAGE.value,
            gpus=_GPUS.value,
            evaluators=_EVALUATORS.value,
            elastic=_ELASTIC.value,
            command=tuple(argv[1:]) or TRAINER,
            # A command of the user need not know the flag.
            exit_codes=not argv[1:],
            slots=_SLOTS.value,
            compute_secs=_STEP_MS.value / 1e3,
            network_bytes_per_s=_NETWORK.value * 1e9 / 8,
        )
        print(render(_FOR.value, request, sys.argv[1:]), end="")
    except ValueError as error:
        print(f"manifests: {error}", file=sys.stderr)
        return exit_codes.CONFIGURATION.plain
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=exit_codes.parse_flags)
