"""A request as the text of a launch file."""

from collections.abc import Callable, Mapping
from typing import Any

import yaml

from harness.manifests import kubernetes, scripts
from harness.manifests.request import ClusterRequest

_TOKEN = (
    "First, once, the secret that keeps others out (docs/security.md):",
    "    kubectl create secret generic {name}-token --from-literal=token=$(openssl rand -hex 32)",
)
_KUBERNETES: Mapping[str, Callable[[ClusterRequest], list[kubernetes.Object]]] = {
    "jobset": kubernetes.jobset,
    "tfjob": kubernetes.tfjob,
    "statefulset": kubernetes.statefulset,
}
ENGINES = (*_KUBERNETES, "slurm")


def render(engine: str, request: ClusterRequest) -> str:
    """The launch file of a request.

    Raises:
        ValueError: the engine cannot start such a cluster; says why.
    """
    if request.evaluators and engine == "slurm":
        raise ValueError(f"--evaluators: with {engine} start one by hand, with --job_name=evaluator")
    if engine == "slurm":
        return scripts.slurm(request)
    notes = [line.format(name=request.name) for line in _TOKEN]
    return request.heading(engine, *notes) + "---\n".join(_text(made) for made in _KUBERNETES[engine](request))


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes texts of several lines as such, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """A reader is served better by the same thing twice."""
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _string)


def _text(made: Mapping[str, Any]) -> str:
    text: str = yaml.dump(made, Dumper=_Dumper, sort_keys=False, width=120)
    return text
