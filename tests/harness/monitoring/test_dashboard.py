"""The dashboard and the scrape configuration of configs/prometheus are for what tasks tell: in a real Prometheus."""

import contextlib
import http
import json
import pathlib
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml

import harness
import runtime as rt
from harness.monitoring.prometheus import MetricsServer
from tests.kit.ports import free_ports

CONFIGS = pathlib.Path(__file__).resolve().parents[3] / "configs" / "prometheus"
PANELS = json.loads((CONFIGS / "grafana.json").read_text())["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
ABSENT = ("device_", "backup_", "checkpoint_seconds", "errors_", "refused_")
"""Series that this cluster does not have, by how they begin: no accelerator, no backup, nothing that went wrong."""
TIMEOUT_SECS = 100.0


def test_dashboard_shows_existing_metrics() -> None:
    """Every panel of the dashboard shows metrics that tasks export."""
    told = {f"bellwether_{name}" for name in (*rt.lowlevel.METRICS, "started_unix_secs")}
    shown = [set(re.findall(r"bellwether_\w+", expression)) for expression in EXPRESSIONS]
    assert all(shown) and set().union(*shown) <= told


def test_panels_do_not_overlap() -> None:
    """Panels have places, numbers and titles of their own, and each is described."""
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in PANELS}
    assert (
        len(places)
        == len({panel["id"] for panel in PANELS})
        == len({p["title"] for p in PANELS})
        == len(PANELS)
    )
    assert all(
        panel["description"] and panel["datasource"]["uid"] == "${datasource}" for panel in PANELS
    )


@contextlib.contextmanager
def trained(logdir: pathlib.Path) -> Iterator[list[int]]:
    """A cluster in which a worker trains until the end of the block; gives the ports of the figures."""
    with contextlib.ExitStack() as stack, rt.Graph().as_default():
        cluster = stack.enter_context(rt.local_cluster(ps=1, workers=1))
        with cluster.device():
            global_step = harness.get_or_create_global_step()
            w = rt.Variable(np.ones(3, np.float32), name="w")
            loss = rt.call(lambda w: jnp.sum(w**2), w)
            train_op = harness.Optimizer(optax.sgd(0.01)).minimize(loss, global_step=global_step)
        supervisor = harness.Supervisor(is_chief=True, logdir=str(logdir), summary_op=None)
        session = stack.enter_context(supervisor.managed_session(cluster.target))
        loop = harness.LooperThread(supervisor.coord, None, target=session.run, args=(train_op,))
        stack.callback(loop.join)
        stack.callback(supervisor.request_stop)
        loop.start()
        yield [
            stack.enter_context(MetricsServer(server, 0)).port
            for server in cluster.servers.values()
        ]


@contextlib.contextmanager
def prometheus(config: pathlib.Path, folder: pathlib.Path) -> Iterator[str]:
    """A Prometheus; gives its address."""
    (port,) = free_ports(1)
    log = (folder / "log").open("w")
    flags = [
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with log, subprocess.Popen(["prometheus", *flags], stdout=log, stderr=log) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def ask(address: str, query: str) -> list[Any]:
    """What a Prometheus answers to an expression; nothing while it starts."""
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return list(json.load(answer)["data"]["result"])
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.SERVICE_UNAVAILABLE:  # it listens, and reads its store
            return []
        raise AssertionError(f"{query}: {error.read().decode()}") from None
    except urllib.error.URLError:
        return []


@pytest.mark.cluster
@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no Prometheus: apt-get install prometheus"
)
def test_prometheus_answers_every_panel(tmp_path: pathlib.Path) -> None:
    """A real Prometheus answers every panel of the dashboard for a training cluster."""
    checked = subprocess.run(
        ["promtool", "check", "config", CONFIGS / "prometheus.yml"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    with trained(tmp_path / "run") as ports:
        config = yaml.safe_load((CONFIGS / "prometheus.yml").read_text())
        config["global"]["scrape_interval"] = "1s"
        (job,) = config["scrape_configs"]
        job["static_configs"] = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        with prometheus(tmp_path / "prometheus.yml", tmp_path) as address:
            for expression in EXPRESSIONS:
                query = expression.replace("$__rate_interval", "30s")
                missing = any(f"bellwether_{begin}" in expression for begin in ABSENT)
                deadline = time.monotonic() + (0 if missing else TIMEOUT_SECS)
                while not (found := ask(address, query)) and time.monotonic() < deadline:
                    time.sleep(0.1)
                assert found or missing, (
                    f"no series for {query}; {(tmp_path / 'log').read_text()[-2000:]}"
                )
            tasks = {
                (found["metric"]["job"], found["metric"]["task"])
                for found in ask(address, "bellwether_memory_bytes")
            }
            assert tasks == {("ps", "0"), ("worker", "0")}  # not the job of the scrape
