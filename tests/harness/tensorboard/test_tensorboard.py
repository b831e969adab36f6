"""What TensorBoard itself makes of our event files: its HTTP API asked, and its pages looked at in a browser."""

import contextlib
import io
import json
import pathlib
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from PIL import Image
from tensorboard.compat.proto import config_pb2

import harness
import runtime as rt
from harness.monitoring.cluster_scalars import LAYOUT
from tests.browser import Browser, why_no_browser
from tests.runtime.kit import TARGET, servers

pytestmark = pytest.mark.browser

pytest.importorskip("tensorboard")
START_SECS = 60.0
Get = Callable[..., Any]


@contextlib.contextmanager
def tensorboard(logdir: pathlib.Path, *flags: str) -> Iterator[str]:
    """A TensorBoard on ``logdir``; gives its address."""
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        f"--logdir={logdir}",
        "--host=127.0.0.1",
        "--port=0",
        *flags,
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            if found:
                break
        else:
            raise AssertionError("".join(said))
        yield found.group(0)
    finally:
        process.terminate()
        process.wait(30)
        assert process.stderr is not None
        process.stderr.close()


def get(base: str, path: str, **query: str) -> Any:
    """What a page of the API gives, once it gives something: TensorBoard loads its files in the background."""
    url = f"{base}/{path}?{urllib.parse.urlencode(query)}"
    deadline = time.monotonic() + START_SECS
    pause = 0.05
    while True:
        with (
            contextlib.suppress(urllib.error.HTTPError),
            urllib.request.urlopen(url, timeout=30) as answer,
        ):
            data = answer.read()
            found = json.loads(data) if "json" in answer.headers["Content-Type"] else data
            if found:
                return found
        assert time.monotonic() < deadline, f"nothing at {url}"
        time.sleep(pause)  # there is no event to wait for in another program


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run with everything in it: a graph over a ps and a worker, a traced step, all kinds of summaries."""
    path = tmp_path_factory.mktemp("run")
    with rt.Graph().as_default() as graph, servers(sockets=True, ps=1, worker=1) as made:
        server = made[TARGET]
        with rt.device(rt.replica_device_setter(cluster=server.cluster, worker_device=TARGET)):
            w = rt.Variable(np.ones((4, 3), np.float32), name="model/w")
            x = rt.placeholder(np.float32, [None, 4], "x")
            with rt.name_scope("model"):
                y = rt.numpy.matmul(x, w, name="product")
                loss = rt.numpy.mean(y, name="loss")
            train = w.assign_add(-0.1 * rt.gradients(loss, [w])[0], name="train")
        harness.summary.scalar("loss", loss)
        harness.summary.histogram("weights", w)
        harness.summary.image("picture", rt.numpy.ones((1, 8, 8, 3)), max_outputs=1)
        harness.summary.text("note", rt.constant("some *text*"))
        harness.summary.audio("tone", rt.numpy.zeros((1, 100)), 8000, max_outputs=1)
        merged = harness.summary.merge_all()
        options = rt.RunOptions(trace_level=rt.RunOptions.FULL_TRACE)
        metadata = rt.RunMetadata()
        with rt.Session(server.target, graph) as session, harness.FileWriter(path, graph) as writer:
            session.run(rt.global_variables_initializer())
            writer.add_hparams({"rate": 0.1, "rule": "sgd", "momentum": None}, ["loss"])
            writer.add_layout(LAYOUT)
            for step in range(5):
                feeds = {x: np.full((2, 4), step, np.float32)}
                found = session.run([train, merged], feeds, options, metadata)
                writer.add_summary(found[1], step)
            writer.add_scalars({"step_ms/worker_0": 1.0}, 1)
            writer.add_run_metadata(metadata, "step 4", 4)
    return path


@pytest.fixture(scope="module")
def page(logdir: pathlib.Path) -> Iterator[str]:
    with tensorboard(logdir) as base:
        get(base, "data/plugin/scalars/scalars", run=".", tag="loss")
        yield base


def test_tensorboard_shows_scalars(page: str) -> None:
    """TensorBoard shows the scalars of each step."""
    found = get(page, "data/plugin/scalars/scalars", run=".", tag="loss")
    assert [point[1] for point in found] == [0, 1, 2, 3, 4]
    assert found[0][2] == 0.0 and found[1][2] != 0.0


def test_tensorboard_shows_histograms(page: str) -> None:
    """TensorBoard shows the histograms with all their elements."""
    found = get(page, "data/plugin/histograms/histograms", run=".", tag="weights")
    assert len(found) == 5
    assert sum(count for _, _, count in found[0][2]) == 12


def test_tensorboard_shows_images(page: str) -> None:
    """TensorBoard shows an image of the right size."""
    found = get(page, "data/plugin/images/images", run=".", tag="picture/image", sample="0")
    with urllib.request.urlopen(
        f"{page}/data/plugin/images/individualImage?{found[0]['query']}"
    ) as answer:
        assert Image.open(io.BytesIO(answer.read())).size == (8, 8)


def test_tensorboard_shows_text(page: str) -> None:
    """TensorBoard renders a text summary as Markdown."""
    assert "<em>text</em>" in get(page, "data/plugin/text/text", run=".", tag="note")[0]["text"]


def test_tensorboard_plays_audio(page: str) -> None:
    """TensorBoard serves an audio clip as a WAV file."""
    found = get(page, "data/plugin/audio/audio", run=".", tag="tone/audio", sample="0")
    with urllib.request.urlopen(
        f"{page}/data/plugin/audio/individualAudio?{found[0]['query']}"
    ) as answer:
        assert answer.read().startswith(b"RIFF")


def test_tensorboard_shows_the_graph(page: str) -> None:
    """TensorBoard shows the graph with the devices of ps and worker."""
    graph = get(page, "data/plugin/graphs/graph", run=".").decode()
    assert 'name: "model/product"' in graph
    assert 'device: "/job:ps/task:0"' in graph and 'device: "/job:worker/task:0"' in graph


def test_tensorboard_shows_run_metadata(page: str) -> None:
    """TensorBoard shows the traced step with shapes, bytes and times."""
    found = get(page, "data/plugin/graphs/run_metadata", run=".", tag="step 4").decode()
    assert 'device: "/job:ps/replica:0/task:0/device:CPU:0"' in found
    assert 'node_name: "model/product"' in found
    assert "requested_bytes: 48" in found  # the variable, 12 floats
    # TensorBoard's page reads the shape of every output, and without one, a scalar's too, shows
    # nothing of the step.
    metadata = text_format.Parse(found, config_pb2.RunMetadata())
    nodes = [node for device in metadata.step_stats.dev_stats for node in device.node_stats]
    assert all(
        output.tensor_description.HasField("shape") for node in nodes for output in node.output
    )
    assert [node.all_end_rel_micros > 0 for node in nodes if node.node_name == "model/loss"] == [
        True
    ]


def test_tensorboard_shows_hyperparameters(page: str) -> None:
    """TensorBoard shows the hyperparameters and their metric."""
    body = json.dumps({"experimentName": ""}).encode()
    request = urllib.request.Request(
        f"{page}/data/plugin/hparams/experiment",
        body,
        {"Content-Type": "application/json"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        found = json.load(answer)
    assert {h["name"] for h in found["hparamInfos"]} == {"rate", "rule"}
    assert [m["name"]["tag"] for m in found["metricInfos"]] == ["loss"]


def test_tensorboard_shows_the_layout(page: str) -> None:
    """TensorBoard shows the layout of the standard series."""
    found = get(page, "data/plugin/custom_scalars/layout")
    assert [category["title"] for category in found["category"]] == list(LAYOUT)


_FIND = """
const all = [];
const walk = (node) => {
  if (node.nodeType === Node.ELEMENT_NODE) all.push(node);
  if (node.shadowRoot) node.shadowRoot.childNodes.forEach(walk);
  node.childNodes.forEach(walk);
};
walk(document.body);
const found = (name) => all.filter((e) => e.nodeName === name);
"""


@pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())
def test_browser_shows_scalars_and_graph(page: str, tmp_path: pathlib.Path) -> None:
    """The pages of scalars and graph are drawn in a browser, with the times of a traced step."""
    with Browser(tmp_path / "profile") as browser:
        browser.open(f"{page}/#scalars")
        browser.wait_text("loss")
        browser.wait("return document.querySelectorAll('*').length > 100")
        scalars = browser.screenshot(tmp_path / "scalars.png")
        assert "No scalar data was found" not in browser.text()

        browser.open(f"{page}/?again#graphs")
        browser.wait_text("Main Graph")
        browser.wait_text("model")
        assert browser.click("Device")
        graph = browser.screenshot(tmp_path / "graph.png")
        assert "Malformed" not in browser.text() and "Error" not in browser.text()

        # A traced step: what the page has joined to the graph's nodes.
        browser.wait(
            _FIND
            + "return found('PAPER-ITEM').filter(e => e.textContent.trim() === 'step 4').length"
        )
        browser.run(
            _FIND + "found('PAPER-ITEM').find(e => e.textContent.trim() === 'step 4').click()"
        )
        micros = _FIND + (
            "const h = found('TF-GRAPH')[0].graphHierarchy; const n = h && h.node('model/product');"
            "return n && n.stats && n.stats.getTotalMicros()"
        )
        assert browser.wait(micros) > 0
        assert browser.click("Compute time")

        assert scalars != graph
        for name in ("scalars.png", "graph.png"):
            # below the coloured bar
            picture = np.asarray(Image.open(tmp_path / name).convert("L"))[100:]
            assert picture.std() > 5, f"{name} is empty"
