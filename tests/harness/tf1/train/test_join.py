"""``tf.train.Server.join`` never returns into the program: classic ones go on with the worker's code after it."""

import signal
import textwrap
import threading

import pytest

import harness.tf1 as tf
import runtime as rt
from harness import exit_codes
from tests.kit.processes import Program

PS = """
    import signal
    import threading
    import time
    import harness.tf1 as tf

    def tell():
        while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            time.sleep(0.01)
        print("serving", flush=True)

    server = tf.train.Server.create_local_server()
    threading.Thread(target=tell).start()
    try:
        server.join()
        print("went on as a worker", flush=True)
    finally:
        print("left", flush=True)
"""


def _ends(how: signal.Signals) -> tuple[int, list[str]]:
    with Program("python", "-c", textwrap.dedent(PS)) as program:
        program.expect("^serving$")
        program.signal(how)
        return program.wait(), program.lines("went on|left")


@pytest.mark.cluster
def test_sigterm_ends_joined_ps() -> None:
    """SIGTERM ends a ps program inside join."""
    assert _ends(signal.SIGTERM) == (exit_codes.PREEMPTED.plain, ["left"])


def test_stop_ends_the_joined_thread() -> None:
    """A stopped server ends the thread that has joined it."""
    server = tf.train.Server.create_local_server()
    assert isinstance(server, tf.train.Server)
    after: list[object] = []

    def serve() -> None:
        try:
            server.join()
            after.append("went on")
        except SystemExit as ended:
            after.append(ended.code)

    thread = threading.Thread(target=serve)
    thread.start()
    server.stop()
    thread.join(60)
    assert not thread.is_alive() and after == [0]


def test_runtime_join_returns() -> None:
    """join of the runtime's own Server returns."""
    server = rt.Server.create_local_server()
    server.stop()
    assert server.join()
