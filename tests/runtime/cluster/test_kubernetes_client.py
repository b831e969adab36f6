"""The Kubernetes resolver with PyPI's client, over HTTP and HTTPS, and a server that answers as the API server does."""

import http.server
import json
import pathlib
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import trustme
import yaml

import runtime as rt

kubernetes = pytest.importorskip("kubernetes", reason="needs PyPI's kubernetes")

TOKEN = "of-this-service-account"
LABELS = {"ps": ["app=mnist,role=ps"], "worker": ["app=mnist,role=worker"]}


def pod(name: str, role: str, ip: str, namespace: str = "mine", phase: str = "Running") -> dict[str, Any]:
    """As an API server writes it, with the fields that are looked at and some that are not."""
    status = {"phase": phase, "hostIP": "192.0.2.9", "conditions": [], "startTime": "2026-01-01T00:00:00Z"}
    return {
        "metadata": {"name": name, "namespace": namespace, "uid": name, "labels": {"app": "mnist", "role": role}},
        "spec": {"containers": [{"name": "main", "image": "mnist:1"}]},
        "status": status | ({"podIP": ip, "podIPs": [{"ip": ip}]} if ip else {}),
    }


@dataclass
class ApiServer:
    """Lists pods by namespace and label, for who has the token."""

    pods: list[dict[str, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    allowed: Callable[[str], bool] = lambda path: True

    def answer(self, path: str, authorization: str | None) -> tuple[int, dict[str, Any]]:
        url = urllib.parse.urlsplit(path)
        self.asked.append(url.path)
        scheme, _, token = (authorization or "").partition(" ")
        if (scheme.lower(), token) != ("bearer", TOKEN):
            return 401, self.refusal(401, "Unauthorized")
        if not self.allowed(url.path):
            return 403, self.refusal(403, "Forbidden")
        parts = url.path.strip("/").split("/")
        if parts[:2] != ["api", "v1"] or parts[-1] != "pods" or len(parts) not in (3, 5):
            return 404, self.refusal(404, "NotFound")
        namespace = parts[3] if len(parts) == 5 else None
        (selector,) = urllib.parse.parse_qs(url.query)["labelSelector"]
        wanted = dict(pair.split("=") for pair in selector.split(","))
        found = [
            made
            for made in self.pods
            if namespace in (None, made["metadata"]["namespace"])
            and wanted.items() <= made["metadata"]["labels"].items()
        ]
        return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "7"}, "items": found}

    def refusal(self, code: int, reason: str) -> dict[str, Any]:
        return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}


@pytest.fixture
def api() -> ApiServer:
    return ApiServer()


@pytest.fixture
def server(api: ApiServer) -> Iterator[http.server.ThreadingHTTPServer]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, body = api.answer(self.path, self.headers["Authorization"])
            content = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def outside(server: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A kubeconfig for the server, on a machine that is no pod."""
    monkeypatch.setattr(kubernetes.client.Configuration, "_default", None)
    monkeypatch.setattr("runtime.cluster.kubernetes.SERVICE_ACCOUNT_NAMESPACE", str(tmp_path / "none"))
    monkeypatch.setattr(kubernetes.config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    def write(token: str = TOKEN) -> None:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "mine"}}],
            "current-context": "x",
        }
        (tmp_path / "config").write_text(yaml.safe_dump(config))

    write()
    return write


def test_it_lists_the_pods_of_its_namespace_by_label_with_the_users_token(api: ApiServer, outside: Any) -> None:
    api.pods = [
        pod("worker-10", "worker", "10.0.0.10"),
        pod("worker-2", "worker", "fd00::2"),
        pod("ps-0", "ps", "10.0.0.1"),
        pod("ps-0", "ps", "10.9.9.9", namespace="theirs"),
    ]
    resolver = rt.KubernetesClusterResolver(LABELS, 2222)
    assert resolver.cluster_spec().as_dict() == {
        "ps": ["10.0.0.1:2222"],
        "worker": ["[fd00::2]:2222", "10.0.0.10:2222"],
    }
    assert api.asked == ["/api/v1/namespaces/mine/pods"] * 2
    api.pods[2]["status"]["podIP"] = "10.0.0.77"  # it was made anew
    assert resolver.cluster_spec().task_address("ps", 0) == "10.0.0.77:2222"
    hosts = rt.KubernetesClusterResolver(LABELS, 2222, use_host_ip=True).cluster_spec()
    assert hosts.task_address("ps", 0) == "192.0.2.9:2222"


def test_everywhere_is_another_request(api: ApiServer, outside: Any) -> None:
    api.pods = [pod("a", "ps", "10.0.0.1"), pod("b", "ps", "10.9.9.9", namespace="theirs")]
    spec = rt.KubernetesClusterResolver({"ps": ["role=ps"]}, 1, namespace="*").cluster_spec()
    assert spec.as_dict() == {"ps": ["10.0.0.1:1", "10.9.9.9:1"]} and api.asked == ["/api/v1/pods"]


def test_a_pod_that_does_not_run_yet_is_named(api: ApiServer, outside: Any) -> None:
    api.pods = [pod("ps-0", "ps", "", phase="Pending")]
    with pytest.raises(RuntimeError, match="pod 'ps-0' .* is not running but 'Pending'"):
        rt.KubernetesClusterResolver(LABELS).cluster_spec()


def test_without_the_right_to_list_pods_it_says_what_to_give(api: ApiServer, outside: Any) -> None:
    api.allowed = lambda path: False
    with pytest.raises(rt.PermissionDeniedError, match=r'\(403\) to list pods in namespace .mine.: .*"list" on "pods"'):
        rt.KubernetesClusterResolver(LABELS).cluster_spec()
    outside("of-nobody")
    with pytest.raises(rt.PermissionDeniedError, match=r"refuses \(401\)"):
        rt.KubernetesClusterResolver(LABELS).cluster_spec()


def test_in_a_pod_it_goes_by_the_service_account(
    api: ApiServer, server: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "namespace").write_text("mine")
    monkeypatch.setattr(kubernetes.client.Configuration, "_default", None)
    incluster = kubernetes.config.incluster_config
    monkeypatch.setattr(incluster, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr("runtime.cluster.kubernetes.SERVICE_ACCOUNT_NAMESPACE", str(tmp_path / "namespace"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_port))
    api.pods = [pod("ps-0", "ps", "10.0.0.1")]
    assert rt.KubernetesClusterResolver({"ps": ["role=ps"]}, 2222).cluster_spec().as_dict() == {"ps": ["10.0.0.1:2222"]}
    assert api.asked == ["/api/v1/namespaces/mine/pods"]
