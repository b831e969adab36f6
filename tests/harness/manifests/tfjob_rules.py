"""A controller that follows the rules of Kubeflow's training operator (1.x) for a TFJob, over pods of namespaces.

Its source (github.com/kubeflow/training-operator, pkg/controller.v1/tensorflow) is the
documentation:

* a pod's name is ``<tfjob>-<role>-<index>``; a headless service of that name leads to it, once it
  is ready: ``<name>.<namespace>.svc``, and after that what the operator's CUSTOM_CLUSTER_DOMAIN
  says (genClusterSpec)
* TF_CONFIG has all roles but the evaluator; with enableDynamicWorker it has ``sparseCluster``, in
  which a worker has itself and all ps, a ps has itself alone, and whoever else has nothing
  (convertClusterSpecToSparseClusterSpec)
* restartPolicy ExitCode: a pod that ends with 130, 137, 138 or 143 is made anew, another failure is
  the job's, unless it is a worker's and workers are dynamic (ReconcilePods, UpdateJobStatus). A pod
  that was deleted (or evicted) is made anew whatever its code is, for it is missing
* the job is done when its chief is; one without a chief when worker 0 is (IsWorker0Completed). Then
  pods that run are deleted (cleanPodPolicy Running)
* the number of replicas may be changed: pods beyond it are deleted, missing ones made
    (GetPodSlices)

Prints "RULE name ExitCode restart" or "RULE name ExitCode fail", and "TFJOB Succeeded" or "TFJOB
Failed" besides.
"""

import json
from typing import Any

from tests.harness.manifests.pods import Node, Pod, say

RETRYABLE = (130, 137, 138, 143)
NAMESPACE = "ml"


class TFJob:
    """The controller of one TFJob: ``control`` runs it to its end.

    Args:
        manifest: of the TFJob.
        domain: CUSTOM_CLUSTER_DOMAIN of the operator.
    """

    def __init__(self, manifest: dict[str, Any], domain: str) -> None:
        self.node = Node(self._ended, only_ready=True)
        self.result = ""
        self._name = manifest["metadata"]["name"]
        self._spec = manifest["spec"]
        self._roles = {
            kind.lower(): spec for kind, spec in manifest["spec"]["tfReplicaSpecs"].items()
        }
        self._domain = f".{domain}" if domain else ""
        assert all(spec["restartPolicy"] == "ExitCode" for spec in self._roles.values())
        assert (
            self._spec["runPolicy"]["cleanPodPolicy"] == "Running"
            and self._spec["successPolicy"] == ""
        )

    def control(self) -> None:
        """Runs it to its end."""
        for role in self._roles:
            for key in self._keys(role):
                self._start(key)
        while not self.result:
            self.node.look()
        self.node.finish()
        say(f"TFJOB {self.result}")

    def scale(self, role: str, replicas: int) -> None:
        """Changes the replicas of a role, as ``kubectl patch`` does."""

        def change() -> None:
            before = self._keys(role)
            self._roles[role]["replicas"] = replicas
            for key in self._keys(role)[len(before) :]:
                self._start(key)
            for key in before[replicas:]:
                self.node.delete(self.node.pods[key])

        self.node.order(change)

    def _keys(self, role: str) -> list[tuple[str, ...]]:
        return [(role, str(index)) for index in range(self._roles[role]["replicas"])]

    def _address(self, role: str, index: int) -> str:
        """As genClusterSpec has it; the port is that of the container's port of this name."""
        (container,) = self._roles[role]["template"]["spec"]["containers"]
        (port,) = [p["containerPort"] for p in container["ports"] if p["name"] == "tfjob-port"]
        return f"{self._name}-{role}-{index}.{NAMESPACE}.svc{self._domain}:{port}"

    def _tf_config(self, role: str, index: int) -> str:
        cluster = {
            r: [self._address(r, i) for i in range(len(self._keys(r)))]
            for r in self._roles
            if r != "evaluator"
        }
        task = {"type": role, "index": index}
        if not self._spec.get("enableDynamicWorker"):
            return json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})
        sparse: dict[str, Any] = {"worker": {}, "ps": []}
        if role == "ps":
            sparse["ps"] = [cluster["ps"][index]]
        elif role == "worker":
            sparse = {"worker": {str(index): cluster["worker"][index]}, "ps": cluster["ps"]}
        return json.dumps({"sparseCluster": sparse, "task": task})

    def _start(self, key: tuple[str, ...]) -> None:
        role, index = key[0], int(key[1])
        pod = self._roles[role]["template"]["spec"]
        assert pod["containers"][0]["name"] == "tensorflow"
        told = {"TF_CONFIG": self._tf_config(role, index)}
        service = self._address(role, index).partition(":")[0]
        self.node.start(key, f"{self._name}-{role}-{index}", pod, [service], told, {})

    def _ended(self, pod: Pod, code: int) -> None:
        role = pod.key[0]
        if self.result or pod.key not in self._keys(role):
            return
        leads = pod.key == (("chief", "0") if "chief" in self._roles else ("worker", "0"))
        if code == 0 and not pod.is_deleted:
            self.result = "Succeeded" if leads else ""
        elif code in RETRYABLE or pod.is_deleted:
            say(f"RULE {pod.name} ExitCode restart")
            self._start(pod.key)
        else:
            say(f"RULE {pod.name} ExitCode fail")
            if not (self._spec.get("enableDynamicWorker") and role == "worker"):
                self.result = "Failed"
