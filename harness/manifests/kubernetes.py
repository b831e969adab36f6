"""Manifests for Kubernetes: a JobSet, a TFJob, or a StatefulSet of ps with an indexed Job of workers."""

from __future__ import annotations

from typing import Any

from harness.launch.policy import CHIEF_JOB, EVALUATOR, PS, WORKER
from harness.manifests.request import (
    NEVER_AGAIN,
    PORT,
    PS_GRACE_SECS,
    PS_PAUSE_SECS,
    RUNS,
    TOKEN_DIRECTORY,
    WORKER_GRACE_SECS,
    ClusterRequest,
)

Object = dict[str, Any]
USER = 1000
"""Of the image, not root."""
CONTAINER = "bellwether"
TFJOB_CONTAINER = "tensorflow"
"""The name that the TFJob operator looks for."""
MAX_RESTARTS = 10
_LABEL = "app.kubernetes.io/instance"


def jobset(request: ClusterRequest) -> list[Object]:
    """A JobSet: ps before workers, done when all workers are; a worker is made anew without a limit, and alone."""
    jobs = request.tasks

    def job(name: str) -> Object:
        pod = _pod(request, name, request.arguments("jobset", "--cluster_from=jobset"), CONTAINER)
        labels = {"JOBSET_NAME": "jobset-name", "REPLICATED_JOB_NAME": "replicatedjob-name", "JOB_INDEX": "job-index"}
        pod["spec"]["containers"][0]["env"] += [
            _from_pod(variable, f"metadata.labels['jobset.sigs.k8s.io/{label}']") for variable, label in labels.items()
        ]
        grows = request.elastic and name == WORKER
        counts = {
            job: f"1x{count}+" if request.elastic and job == WORKER else str(count) for job, count in jobs.items()
        }
        sizes = ",".join(f"{job}={count}" for job, count in counts.items() if job != EVALUATOR)
        pod["spec"]["containers"][0]["env"].append({"name": "BELLWETHER_JOBS", "value": sizes})
        pod["spec"]["restartPolicy"] = "Never"
        never = {"containerName": CONTAINER, "operator": "In", "values": [NEVER_AGAIN]}
        return {
            "name": name,
            # A child job for each task: one that fails is made anew alone. Of child jobs, not of their number, the pods
            # may be changed: where workers come and go there is one, which makes its pods anew itself.
            "replicas": 1 if grows else jobs[name],
            "template": {
                "spec": {
                    "parallelism": jobs[name] if grows else 1,
                    "completions": jobs[name] if grows else 1,
                    **({"backoffLimitPerIndex": MAX_RESTARTS} if grows else {"backoffLimit": 0}),
                    "podFailurePolicy": {
                        "rules": [
                            {"action": "FailJob", "onExitCodes": never},
                            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                        ]
                    },
                    "template": pod,
                }
            },
        }

    others = [name for name in jobs if name != PS]
    rules = [
        {
            "name": "never-again",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "targetReplicatedJobs": [PS, WORKER],
        },
        {"name": "worker", "action": "RestartJobAndIgnoreMaxRestarts", "targetReplicatedJobs": others},
        {"name": "ps", "action": "RestartJob", "targetReplicatedJobs": [PS]},
    ]
    return [
        *_shared(request),
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": request.name, "labels": {_LABEL: request.name}},
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": request.name, "publishNotReadyAddresses": True},
                "startupPolicy": {"startupPolicyOrder": "InOrder"},
                "successPolicy": {"operator": "All", "targetReplicatedJobs": [WORKER]},
                "failurePolicy": {"maxRestarts": MAX_RESTARTS, "rules": rules},
                "replicatedJobs": [job(name) for name in jobs],
            },
        },
    ]


def tfjob(request: ClusterRequest) -> list[Object]:
    """A TFJob of Kubeflow's training operator: chief, workers, ps and evaluator, with exit codes as it reads them.

    Where workers come and go worker 0 is the chief: with enableDynamicWorker the operator tells a Chief of no ps.
    """
    chiefs = 0 if request.elastic else 1
    counts = {CHIEF_JOB: chiefs, PS: request.ps, WORKER: request.workers - chiefs, EVALUATOR: request.evaluators}
    kinds = {CHIEF_JOB: "Chief", PS: "PS", WORKER: "Worker", EVALUATOR: "Evaluator"}

    def replicas(job: str) -> Object:
        pod = _pod(
            request, job, request.arguments("tfjob", "--cluster_from=tf_config"), TFJOB_CONTAINER, port="tfjob-port"
        )
        return {"replicas": counts[job], "restartPolicy": "ExitCode", "template": pod}

    return [
        *_shared(request),
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "TFJob",
            "metadata": {"name": request.name, "labels": {_LABEL: request.name}},
            "spec": {
                "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": MAX_RESTARTS},
                "successPolicy": "",  # the chief, or worker 0: it waits for the others itself
                **({"enableDynamicWorker": True} if request.elastic else {}),
                "tfReplicaSpecs": {kinds[job]: replicas(job) for job, count in counts.items() if count},
            },
        },
    ]


def statefulset(request: ClusterRequest) -> list[Object]:
    """What needs no operator: a StatefulSet of ps, and an indexed Job of workers."""
    ps, workers = f"{request.name}-{PS}", f"{request.name}-{WORKER}"
    hosts = [
        f"--ps_hosts={','.join(f'{ps}-{i}.{request.name}:{PORT}' for i in range(request.ps))}",
        f"--worker_hosts={','.join(f'{workers}-{i}.{request.name}:{PORT}' for i in range(request.workers))}",
    ]

    def pod(job: str, index: str) -> Object:
        own = [*hosts, f"--job_name={job}", f"--task_index={index}"]
        made = _pod(request, job, request.arguments("jobset", *own), CONTAINER)
        made["metadata"] = {"labels": {_LABEL: request.name, "app.kubernetes.io/component": job}}
        made["spec"]["subdomain"] = request.name
        return made

    of_ps = pod(PS, "$(TASK_INDEX)")
    path = "metadata.labels['apps.kubernetes.io/pod-index']"
    of_ps["spec"]["containers"][0]["env"].insert(0, _from_pod("TASK_INDEX", path))

    def job(name: str, count: int) -> Object:
        of_job = pod(name, "$(JOB_COMPLETION_INDEX)")
        of_job["spec"]["restartPolicy"] = "Never"
        never = {"containerName": CONTAINER, "operator": "In", "values": [NEVER_AGAIN]}
        lost = {"type": "DisruptionTarget", "status": "True"}
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": f"{request.name}-{name}", "labels": {_LABEL: request.name}},
            "spec": {
                "completionMode": "Indexed",
                "completions": count,
                "parallelism": count,
                "backoffLimitPerIndex": MAX_RESTARTS,
                "maxFailedIndexes": 0,
                "podFailurePolicy": {
                    "rules": [
                        {"action": "FailJob", "onExitCodes": never},
                        {"action": "Ignore", "onPodConditions": [lost]},
                    ]
                },
                "template": of_job,
            },
        }

    selector = {_LABEL: request.name, "app.kubernetes.io/component": PS}
    return [
        *_shared(request),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": request.name, "labels": {_LABEL: request.name}},
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {_LABEL: request.name},
                "ports": [{"name": "grpc", "port": PORT}],
            },
        },
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": ps, "labels": {_LABEL: request.name}},
            "spec": {
                "serviceName": request.name,
                "replicas": request.ps,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": selector},
                "template": of_ps,
            },
        },
        *(job(name, count) for name, count in request.tasks.items() if name != PS),
    ]


def _shared(request: ClusterRequest) -> list[Object]:
    """The volume of runs."""
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": f"{request.name}-runs", "labels": {_LABEL: request.name}},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": f"{request.storage_gib()}Gi"}},
            },
        }
    ]


def _from_pod(variable: str, path: str) -> Object:
    """A variable that has the value of a field of its pod."""
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _pod(request: ClusterRequest, job: str, command: list[str], container: str, port: str = "grpc") -> Object:
    """The template of a task's pod."""
    env: list[Object] = [{"name": name, "value": value} for name, value in request.environment(job).items()]
    # Compiled programs lie on the volume: a pod that is made anew takes them, and the home of the
    # user is lost with the pod, or cannot be written.
    env.append({"name": "XDG_CACHE_HOME", "value": f"{RUNS}/.cache"})
    # Its own name may not resolve yet when a pod starts.
    env.append(_from_pod("BELLWETHER_BIND", "status.podIP"))
    memory = f"{request.memory_mib(job)}Mi"
    resources: Object = {"requests": {"cpu": f"{request.cores(job):g}", "memory": memory}, "limits": {"memory": memory}}
    if request.gpus and job != PS:
        resources["limits"]["nvidia.com/gpu"] = str(request.gpus)
    made: Object = {
        "name": container,
        "image": request.image,
        "command": command,
        "env": env,
        "ports": [{"name": port, "containerPort": PORT}],
        "resources": resources,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "runs", "mountPath": RUNS},
            {"name": "token", "mountPath": TOKEN_DIRECTORY, "readOnly": True},
        ],
    }
    if job != EVALUATOR:  # which serves nobody
        health = {"grpc": {"port": PORT}}
        made["readinessProbe"] = {**health, "periodSeconds": 5, "timeoutSeconds": 5}
        # Ten minutes: a ps that reads a large checkpoint may be slow to answer, and killing it would begin that anew.
        made["livenessProbe"] = {**health, "periodSeconds": 30, "timeoutSeconds": 10, "failureThreshold": 20}
    if job == PS:
        made["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(PS_PAUSE_SECS)]}}}
    return {
        "spec": {
            "terminationGracePeriodSeconds": PS_GRACE_SECS if job == PS else WORKER_GRACE_SECS,
            # Process number 1 does not hear SIGTERM before it has a handler: one that starts would be killed, late.
            "shareProcessNamespace": True,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [made],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": {"claimName": f"{request.name}-runs"}},
                {"name": "token", "secret": {"secretName": f"{request.name}-token", "defaultMode": 0o440}},
            ],
        },
    }
