"""The Kubernetes resolver: the cluster as the pods that carry the labels of its jobs."""

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from runtime.cluster.resolvers import ClusterResolver
from runtime.cluster.spec import ClusterSpec, join_address
from runtime.errors import PermissionDeniedError

EVERYWHERE = "*"
SERVICE_ACCOUNT_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
"""The file with the name of a pod's namespace."""


class _PodLister(Protocol):
    """The part of `kubernetes.client.CoreV1Api` that is used."""

    def list_pod_for_all_namespaces(self, *, label_selector: str) -> Any: ...

    def list_namespaced_pod(self, namespace: str, *, label_selector: str) -> Any: ...


class KubernetesClusterResolver(ClusterResolver):
    """The cluster of the pods with the labels of its jobs.

    A pod with the label of a job is a task of the job, and by the order of names may be its first task, the chief. So
    the resolver looks in one namespace, and trusts all users that may make pods there.

    The tasks of a job are its pods by name, numbers in names counted as numbers: "worker-2" is before "worker-10",
    so the pods of a StatefulSet have the task index that their name tells. All servers listen on one port. The address
    is the pod's own (with `hostNetwork` that is the host's).

    Args:
        job_to_label_mapping: label selectors of each job; by default {"worker": ["job-name=tensorflow"]}.
        tf_server_port: port of every server.
        rpc_layer: prefix of the addresses of `master()`.
        override_client: a `kubernetes.client.CoreV1Api`; by default one made from the service account of this pod,
            or from the user's kubeconfig outside a cluster. Only that default needs the package `kubernetes`.
        namespace: where to look for pods; "*" is everywhere. By default this process's own namespace: that of its
            service account in a pod, that of the kubeconfig's context outside one, else "default".
        use_host_ip: take the address of the pod's host instead, for callers outside the pod network.
        task_type: job of this process.
        task_id: task index of this process.

    Raises:
        ImportError: there is no package `kubernetes` and no `override_client`.
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str = "grpc",
        override_client: _PodLister | None = None,
        *,
        namespace: str | None = None,
        use_host_ip: bool = False,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Makes the resolver; see the class."""
        super().__init__(task_type=task_type, task_id=task_id, rpc_layer=rpc_layer)
        self._selectors = job_to_label_mapping or {"worker": ["job-name=tensorflow"]}
        self._port = tf_server_port
        self._client, of_context = _kubernetes_client() if override_client is None else (override_client, None)
        self._namespace = namespace or _service_account_namespace() or of_context or "default"
        self._use_host_ip = use_host_ip

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster of the present pods.

        Raises:
            RuntimeError: A pod is not in phase "Running".
            PermissionDeniedError: The API server does not let this process list pods.
        """
        return ClusterSpec(
            {
                job: [address for selector in selectors for address in self._addresses(selector)]
                for job, selectors in self._selectors.items()
            }
        )

    def _addresses(self, selector: str) -> list[str]:
        try:
            if self._namespace == EVERYWHERE:
                pods = self._client.list_pod_for_all_namespaces(label_selector=selector).items
            else:
                pods = self._client.list_namespaced_pod(self._namespace, label_selector=selector).items
        except Exception as error:
            # Of the client's ApiException, whose package need not be there.
            if (status := getattr(error, "status", None)) not in (401, 403):
                raise
            where = "any namespace" if self._namespace == EVERYWHERE else f"namespace {self._namespace!r}"
            raise PermissionDeniedError(
                f"the API server refuses ({status}) to list pods in {where}: give the service account of this pod, or "
                'the user of the kubeconfig, a role with the verb "list" on "pods" there'
            ) from error
        addresses = []
        for pod in sorted(pods, key=lambda pod: _natural(pod.metadata.name)):
            if pod.status.phase != "Running":
                raise RuntimeError(
                    f"pod {pod.metadata.name!r} ({selector}) is not running but {pod.status.phase!r}: "
                    "wait until all pods of the cluster run, then resolve again"
                )
            host = pod.status.host_ip if self._use_host_ip else pod.status.pod_ip
            addresses.append(join_address(host, self._port))
        return addresses


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a sort key under which "w-2" is before "w-10"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _service_account_namespace() -> str | None:
    """Returns the namespace of the pod of this process; None outside a pod."""
    try:
        with open(SERVICE_ACCOUNT_NAMESPACE, encoding="utf-8") as file:
            return file.read().strip() or None
    except OSError:
        return None


def _kubernetes_client() -> tuple[_PodLister, str | None]:
    """Returns a client, and the namespace of the kubeconfig's context if the client comes from a kubeconfig."""
    try:
        # By name: only users of this resolver have the package, and type checkers need not.
        kubernetes = importlib.import_module("kubernetes")
    except ImportError as error:
        raise ImportError(
            "KubernetesClusterResolver needs the package 'kubernetes': pip install kubernetes, or pass override_client"
        ) from error
    namespace: str | None = None
    try:
        kubernetes.config.load_incluster_config()
    except kubernetes.config.ConfigException:
        kubernetes.config.load_kube_config()
        _, active = kubernetes.config.list_kube_config_contexts()
        namespace = active["context"].get("namespace") if active else None
    lister: _PodLister = kubernetes.client.CoreV1Api()
    return lister, namespace
