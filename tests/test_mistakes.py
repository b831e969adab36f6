"""What a user is told who makes a mistake that many make: each message names the thing, and what to do."""

import http.server
import pathlib
import random
import re
import socket
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import harness
import runtime as rt
from runtime import proto
from runtime.errors import UnavailableError
from runtime.rpc.unreached import why_not
from tests.kit.ports import free_ports
from tests.kit.processes import Program


@pytest.fixture(autouse=True)
def graph() -> Iterator[None]:
    with rt.Graph().as_default():
        yield


def tensor(shape: Any = (2,)) -> Any:
    return rt.placeholder(jnp.float32, list(shape), name="x")


def variable() -> Any:
    return rt.Variable(np.zeros(2, np.float32), name="v")


@contextmanager
def local() -> Iterator[rt.Session]:
    with rt.Server.create_local_server() as server, rt.Session(server.target) as session:
        yield session


def uninitialized() -> None:
    w = variable()
    with local() as session:
        session.run(w)


def with_a_callback() -> None:
    def shown(a: jax.Array) -> jax.Array:
        jax.debug.print("{}", a)
        return a * 2

    x = tensor()
    doubled = rt.call(shown, x * 3) + 1
    with local() as session:
        session.run(doubled, {x: np.zeros(2)})


def a_ps_that_trains() -> None:
    ps, worker = (f"127.0.0.1:{port}" for port in free_ports(2))
    with rt.Server({"ps": [ps], "worker": [worker]}, "ps", 0) as server:
        with rt.device("/job:ps/task:0"):
            harness.get_or_create_global_step()
        with harness.Supervisor(is_chief=True).managed_session(server.target):
            pass


_outer: list[Any] = []


def outer() -> Any:
    """A variable that the function of ``rt.call`` is not given."""
    return _outer[-1]


MISTAKES: list[tuple[str, Callable[[], object], type[Exception], str]] = [
    (
        "a jax.numpy function of a tensor",
        lambda: jnp.mean(tensor()),
        ValueError,
        r"'x:0' is a tensor.*rt\.call\(f, x\)",
    ),
    (
        "jit of a tensor",
        lambda: jax.jit(jnp.sin)(tensor()),
        ValueError,
        r"'x:0' is a tensor.*rt\.call\(f, x\)",
    ),
    (
        "vmap over a tensor",
        lambda: jax.vmap(jnp.sin)(tensor()),
        ValueError,
        r"'x:0' is a tensor.*rt\.call\(f, x\)",
    ),
    (
        "grad of variables",
        lambda: jax.grad(jnp.sum)(variable()),
        ValueError,
        r"'v:0' is a tensor.*rt\.gradients",
    ),
    (
        "a method of arrays",
        lambda: tensor().sum(),
        AttributeError,
        r"'sum'.*'x:0' is a tensor.*rt\.numpy",
    ),
    (
        "numpy of a tensor",
        lambda: np.mean(tensor()),
        TypeError,
        r"'x:0' is a tensor of a graph.*Session\.run",
    ),
    (
        "if tensor",
        lambda: bool(tensor()),
        TypeError,
        r"'x:0' is known only when a step runs: use rt\.numpy\.where",
    ),
    (
        "a variable from outside, in an operator",
        lambda: rt.call(lambda a: a * outer(), tensor()),
        ValueError,
        r"'v:0' is used by the function of.*none of its arguments.*rt\.call\(f, \.\.\., v\)",
    ),
    (
        "a variable from outside, by a method",
        lambda: rt.call(lambda a: outer().sum() * a, tensor()),
        ValueError,
        r"'v:0' is used by the function of.*pass it as one",
    ),
    (
        "a variable from outside, in a JAX function",
        lambda: rt.call(lambda a: jnp.sum(outer()) * a, tensor()),
        ValueError,
        r"'v:0' is used by the function of.*pass it as one",
    ),
    (
        "a loss that is no number",
        lambda: harness.Optimizer(optax.sgd(0.1)).minimize(
            rt.call(lambda v: v * v, variable(), name="loss")
        ),
        ValueError,
        r"the loss 'loss:0' is not one number but has shape \[2\].*rt\.numpy\.mean",
    ),
    (
        "no initialiser was run",
        uninitialized,
        rt.FailedPreconditionError,
        r"value v: run rt\.global_variables_init",
    ),
    (
        "jax.debug.print in a step",
        with_a_callback,
        ValueError,
        r"\[shown\].*it has a callback.*rt\.Print.*is fed",
    ),
    (
        "a ps without join",
        a_ps_that_trains,
        ValueError,
        r"^/job:ps/task:0: this task is a parameter.*server\.join\(\)",
    ),
    (
        "clipping by all gradients in a chain",
        lambda: harness.Optimizer(optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1.0))),
        ValueError,
        r"with clip_by_global_norm the update of a variable depends on other.*before_push.*first in the chain",
    ),
    (
        "an optax function that was not called",
        lambda: harness.Optimizer(optax.adam),  # type: ignore[arg-type]
        ValueError,
        r"is one of optax, such as optax\.adam\(1e-3\), and not adam",
    ),
    (
        "a learning rate in place of a transformation",
        lambda: harness.Optimizer(0.01),  # type: ignore[arg-type]
        ValueError,
        r"such as optax\.adam\(1e-3\), and not 0\.01",
    ),
    (
        "an old protobuf",
        lambda: proto.check_version("6.33.6"),
        ImportError,
        r"protobuf.*6\.33\.6 is here: pip install",
    ),
]


@pytest.mark.parametrize(
    ("act", "kind", "text"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_mistake_is_named_with_cure(
    act: Callable[[], object], kind: type[Exception], text: str
) -> None:
    """A mistake that many users make raises an error that names the cure."""
    _outer.append(variable() if "'v:0' is used" in text else None)
    with pytest.raises(kind, match=text):
        act()


def test_called_function_may_use_arrays() -> None:
    """A function for rt.call may use its arguments and arrays from outside."""
    outside = jnp.arange(2.0)
    x, v = tensor(), variable()
    doubled = rt.call(lambda a, b: a * b + outside, x, v)
    assert doubled.shape == (2,)
    # an operator of JAX's array leaves it to the tensor's own
    assert (jnp.ones(2) + v).shape == (2,)


# -- why a task is not reached ---------------------------------------------------------------------------------


@contextmanager
def web_server() -> Iterator[str]:
    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@contextmanager
def other_grpc_server() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


@contextmanager
def mute_server() -> Iterator[str]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def nobody() -> Iterator[str]:
    yield f"127.0.0.1:{free_ports(1)[0]}"


@contextmanager
def no_such_host() -> Iterator[str]:
    yield "no-such-host.invalid:2222"


@pytest.mark.cluster  # a session that waits for three seconds, five times
@pytest.mark.parametrize(
    ("listener", "why"),
    [
        (nobody, "connection refused: nobody listens there"),
        (no_such_host, "no such host"),
        (web_server, "what listens there is no Bellwether task"),
        (other_grpc_server, "what listens there is no Bellwether task"),
        (mute_server, "no answer|no Bellwether task"),
    ],
    ids=["refused", "no such host", "a web server", "another gRPC server", "silent"],
)
def test_wait_for_task_says_why(listener: Callable[[], Any], why: str) -> None:
    """A wait for a task says why the task is not reached."""
    own = f"127.0.0.1:{free_ports(1)[0]}"
    with (
        listener() as address,
        rt.Server({"ps": [address], "worker": [own]}, "worker", 0) as server,
    ):
        config = rt.SessionConfig(start_timeout_secs=3)
        with rt.device("/job:ps/task:0"):
            variable()
        with pytest.raises(rt.OpError, match=f"{re.escape(address)}.*({why})"):
            rt.Session(server.target, config=config)


def test_answer_of_task_is_kept() -> None:
    """The answer of a task itself is shown as it is."""
    assert why_not(UnavailableError("it is starting")) == "it is starting"


WAITS = """
import argparse, numpy as np, runtime as rt, harness
from runtime import timeouts
timeouts.LOG_EVERY_SECS = 0.1
ps, worker = {ports}
server = rt.Server({{"ps": [f"127.0.0.1:{{ps}}"], "worker": [f"127.0.0.1:{{worker}}"]}}, "worker", 0)
with rt.device("/job:ps/task:0"):
    harness.get_or_create_global_step()
with harness.Supervisor().managed_session(server.target) as session:
    pass
"""


@pytest.mark.cluster
def test_plain_script_names_awaited_task(tmp_path: pathlib.Path) -> None:
    """A plain script without app.run names the task that it waits for."""
    ports = free_ports(2)
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(WAITS.format(ports=ports)))
    with Program("python", str(script), cold=True) as program:
        program.expect(
            rf"still waiting for /job:ps/task:0 at 127\.0\.0\.1:{ports[0]} \(connection refused: "
            r"nobody"
        )


# -- packages and programs that are not as ours expect them ----------------------------------------------------


@pytest.mark.cluster
def test_foreign_runtime_package_is_named(tmp_path: pathlib.Path) -> None:
    """A foreign package called runtime is named with its file."""
    (tmp_path / "runtime").mkdir()
    theirs = tmp_path / "runtime" / "__init__.py"
    theirs.write_text("x = 1\n")
    (tmp_path / "train.py").write_text("import harness\n")
    with Program("python", str(tmp_path / "train.py"), cwd=tmp_path, cold=True) as program:
        assert program.wait() == 1
        program.expect(
            re.escape(
                f"ImportError: `import runtime` is {theirs}, which is not Bellwether's runtime"
            )
        )


@pytest.mark.cluster
def test_figures_need_no_parsed_flags() -> None:
    """A program that parses no flags can be watched and profiled."""
    code = """
from harness import monitoring
import runtime as rt
with rt.Server.create_local_server() as server, monitoring.watched(server):
    with monitoring.StepProfiler.from_flags("") as profiler:
        profiler.step(1)
    print("FINE")
"""
    with Program("python", "-c", code) as program:
        program.expect("FINE")
        assert program.wait() == 0


EXITS = """
import atexit, sys
import runtime as rt
server = rt.Server.create_local_server()
print("SERVES", server.address, flush=True)
atexit.register(sys.stdin.readline)  # the interpreter is on its way out, its thread pools are closed, and calls come
"""


@pytest.mark.cluster
def test_unstopped_server_ends_silently() -> None:
    """A program that ends without stopping its server ends silently with 0."""
    with Program("python", "-c", EXITS) as program:
        address = program.expect(r"SERVES (\S+)")[1]
        with ThreadPoolExecutor(8) as callers:
            for report in callers.map(lambda _: rt.probe(address, 30.0), range(32)):
                assert report.task == "/job:local/task:0"
        program.enter("")
        assert program.wait() == 0
        assert program.lines() == [f"SERVES {address}"]


def test_illegal_tree_names_become_names() -> None:
    """Tree keys that are no legal names become legal names."""
    tree = {"mlp/~/linear_0": {"w": np.zeros(1)}, "a b": {"c:d": np.zeros(1)}}
    names = [v.spec.name for v in jax.tree.leaves(rt.variables(tree, name="net"))]
    assert names == ["net/a_b/c_d", "net/mlp/_/linear_0/w"]


_GENERATOR = np.random.default_rng()


def _draw_globally() -> float:
    return _GENERATOR.normal()


@pytest.mark.parametrize(
    "draw",
    [
        np.random.normal,
        lambda: np.random.randint(9),
        random.random,
        _GENERATOR.normal,
        lambda: _GENERATOR.integers(9),
        lambda: _draw_globally(),  # noqa: PLW0108
    ],
)
def test_frozen_random_numbers_warn_once(
    draw: Callable[[], float], request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """A function that draws random numbers while it is traced is named once, with the cure."""
    name = re.sub(r"\W", "_", request.node.name)
    for _ in range(2):
        rt.call(lambda x: x + draw(), tensor([None]), name=name)
    assert caplog.text.count(f"{name!r} draws random numbers") == 1
    assert "rt.random_key()" in caplog.text


def test_constant_numbers_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    """Numbers of a seeded generator that the function makes are constants, and cause no warning."""
    table = _GENERATOR.normal(size=(3, 5))

    def steady(x: jax.Array) -> jax.Array:
        return x * np.random.default_rng(7).normal(size=3) + table.sum(axis=1)

    rt.call(steady, tensor([3]))
    assert not caplog.text


def test_key_draws_new_numbers(caplog: pytest.LogCaptureFixture) -> None:
    """A function that draws with a key gets new numbers in each step, and no warning."""
    noise = rt.call(lambda key: jax.random.normal(key), rt.random_key())
    with local() as session:
        assert session.run(noise) != session.run(noise)
    assert "random numbers" not in caplog.text
