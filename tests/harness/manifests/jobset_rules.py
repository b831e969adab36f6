"""A controller that follows the documented rules of JobSet and of Kubernetes' indexed Jobs, over pods of namespaces.

* a pod's name is ``<jobset>-<job>-<job index>-<pod index>``, and ``.<subdomain>`` after it resolves
  to its address as soon as it has one (jobset.sigs.k8s.io/docs/concepts: DNS hostnames,
  publishNotReadyAddresses)
* startupPolicy InOrder: a replicated job begins when all pods of the one before are ready, by their
    readiness probe
* the first rule of the podFailurePolicy that fits a failed pod decides: FailJob fails its child job
  for the reason PodFailurePolicy; Ignore (of a pod with the condition DisruptionTarget) has the Job
  make the pod anew, and does not count it. Without one, it counts: a Job with backoffLimit 0 has
  failed for the reason BackoffLimitExceeded, one with backoffLimitPerIndex makes the pod of that
  index anew (kubernetes.io: Pod failure policy, Backoff limit per index). A pod that has ended with
  0 is complete, also when it was evicted
* parallelism and completions of an indexed Job may be changed together: further indexes are
  started, those beyond are deleted (kubernetes.io: Elastic Indexed Jobs; keps/463 of JobSet)
* a failed child job: the first rule of the failurePolicy for that job and reason decides:
  FailJobSet, or RestartJob(AndIgnoreMaxRestarts): the child job and its pods are made anew, with
  other addresses; the others are left alone (keps/262 and its API documentation)
* successPolicy All: when the named jobs are complete the JobSet is, and what still runs is deleted

Prints "RULE name rule action" and "JOBSET Completed" or "JOBSET Failed" besides.
"""

from collections import Counter
from typing import Any

from tests.harness.manifests.pods import Node, Pod, say

NAME_LABEL, JOB_LABEL, INDEX_LABEL = (
    f"jobset.sigs.k8s.io/{label}" for label in ("jobset-name", "replicatedjob-name", "job-index")
)


class JobSet:
    """The controller of one JobSet: ``control`` runs it to its end."""

    def __init__(self, manifest: dict[str, Any], haste: float = 1) -> None:
        self.node = Node(self._ended, haste=haste)
        self.result = ""
        self._name = manifest["metadata"]["name"]
        self._spec = manifest["spec"]
        self._complete: set[tuple[str, ...]] = set()
        self._failures: Counter[tuple[str, ...]] = Counter()
        self._restarts = 0

    def control(self) -> None:
        """Runs it to its end."""
        assert self._spec["startupPolicy"]["startupPolicyOrder"] == "InOrder"
        for job in self._spec["replicatedJobs"]:
            for key in self._keys(job["name"]):
                self._start(key)
            while not self.result and not all(
                self._is_settled(key) for key in self._keys(job["name"])
            ):
                self.node.look()
        while not self.result:
            self.node.look()
        self.node.finish()
        say(f"JOBSET {self.result}")

    def scale(self, job: str, pods: int) -> None:
        """Changes parallelism and completions of a replicated job with one child job, as ``kubectl patch`` does."""

        def change() -> None:
            spec = self._job_spec(job)
            before = set(self._keys(job))
            spec["parallelism"] = spec["completions"] = pods
            for key in self._keys(job):
                if key not in before:
                    self._start(key)
            for key in before - set(self._keys(job)):
                self.node.delete(self.node.pods[key])

        self.node.order(change)

    def _job(self, job: str) -> dict[str, Any]:
        return next(found for found in self._spec["replicatedJobs"] if found["name"] == job)

    def _job_spec(self, job: str) -> dict[str, Any]:
        spec: dict[str, Any] = self._job(job)["template"]["spec"]
        assert spec["parallelism"] == spec["completions"]
        return spec

    def _keys(self, job: str, child: str | None = None) -> list[tuple[str, ...]]:
        """The pods of a replicated job, or of one of its child jobs: job, job index, pod index."""
        children = (
            [child] if child is not None else [str(j) for j in range(self._job(job)["replicas"])]
        )
        return [
            (job, j, str(p)) for j in children for p in range(self._job_spec(job)["completions"])
        ]

    def _is_settled(self, key: tuple[str, ...]) -> bool:
        return key in self._complete or (key in self.node.pods and self.node.pods[key].is_ready)

    def _start(self, key: tuple[str, ...]) -> None:
        job, child, index = key
        name = "-".join((self._name, *key))
        told = {"JOB_COMPLETION_INDEX": index}  # completionMode is Indexed by JobSet's default
        labels = {NAME_LABEL: self._name, JOB_LABEL: job, INDEX_LABEL: child}
        pod = self._job_spec(job)["template"]["spec"]
        self.node.start(
            key, name, pod, [f"{name}.{self._spec['network']['subdomain']}"], told, labels
        )

    def _ended(self, pod: Pod, code: int) -> None:
        job, child, _ = pod.key
        if self.result or pod.key not in self._keys(job):
            return
        if code == 0:
            self._complete.add(pod.key)
            success = self._spec["successPolicy"]
            assert success["operator"] == "All"
            awaited = {key for name in success["targetReplicatedJobs"] for key in self._keys(name)}
            self.result = "Completed" if awaited <= self._complete else ""
            return
        spec = self._job_spec(job)
        action = next(
            (r["action"] for r in spec["podFailurePolicy"]["rules"] if _fits(r, pod, code)), "Count"
        )
        if action == "Ignore":
            say(f"RULE {pod.name} disrupted Ignore")
            self._start(pod.key)
            return
        self._failures[pod.key] += action == "Count"
        if action == "Count" and self._failures[pod.key] <= spec.get(
            "backoffLimitPerIndex", spec.get("backoffLimit")
        ):
            self._start(pod.key)
            return
        reason = "PodFailurePolicy" if action == "FailJob" else "BackoffLimitExceeded"
        rule = next(
            rule
            for rule in self._spec["failurePolicy"]["rules"]
            if job in rule.get("targetReplicatedJobs", [job])
            and reason in rule.get("onJobFailureReasons", [reason])
        )
        say(f"RULE {pod.name} {rule['name']} {rule['action']}")
        self._restarts += rule["action"] == "RestartJob"
        if (
            rule["action"] == "FailJobSet"
            or self._restarts > self._spec["failurePolicy"]["maxRestarts"]
        ):
            self.result = "Failed"
            return
        assert rule["action"] in ("RestartJob", "RestartJobAndIgnoreMaxRestarts")
        assert self._keys(job, child) == [pod.key], (
            "a child job with several pods would be ended first"
        )
        del self._failures[pod.key]
        self._start(pod.key)


def _fits(rule: dict[str, Any], pod: Pod, code: int) -> bool:
    """Whether a rule of a podFailurePolicy is about a pod that has ended so."""
    if "onExitCodes" in rule:
        assert rule["onExitCodes"]["operator"] == "In"
        return code in rule["onExitCodes"]["values"]
    return any(
        c["type"] == "DisruptionTarget" and pod.is_disrupted for c in rule["onPodConditions"]
    )
