"""A listener on a machine that has no more threads to give: it says so, refuses one connection, and goes on."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from runtime.cluster.endpoint import Endpoint
from runtime.errors import UnavailableError
from runtime.wire.dial import ChannelOptions
from tests.kit.waits import until
from tests.runtime.wire import kit

pytestmark = pytest.mark.cluster

PATIENT = ChannelOptions(prefer_unix=False, reconnect_secs=20.0)
HASTY = ChannelOptions(prefer_unix=False, reconnect_secs=1.0)
NOBODY = 65534


class LimitedServer:
    """A tensor server in a process of its own, which can be forbidden to start threads."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.wire.test_listener"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.endpoint = Endpoint("127.0.0.1", self.request("port"), None, "", 77)

    def request(self, what: str) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(what, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def stop(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()


def main() -> None:
    import resource

    server, desk = kit.make_server(unix=False)
    if os.geteuid() == 0:  # the limit does not hold for root
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    _, most = resource.getrlimit(resource.RLIMIT_NPROC)
    for line in sys.stdin:
        answer: Any = None
        if line.strip() == "port":
            answer = server.port
        elif line.strip() == "counters":
            answer = [server.counters.connections, server.counters.accepted]
        else:
            resource.setrlimit(
                resource.RLIMIT_NPROC, (1 if line.strip() == "no threads" else most, most)
            )
        print(json.dumps(answer), flush=True)
    desk.release.set()
    server.stop()


@pytest.fixture
def server() -> Iterator[LimitedServer]:
    made = LimitedServer()
    yield made
    made.stop()


def test_missing_thread_costs_one_connection(server: LimitedServer) -> None:
    """A server without threads refuses a new connection, serves the old ones and recovers."""
    old = kit.make_peer(lambda timeout: server.endpoint, options=PATIENT)
    lane = old.acquire()
    assert lane.call(kit.SUM, 1, [], kit.NUMBER) == [0]
    server.request("no threads")
    new = kit.make_peer(lambda timeout: server.endpoint, options=HASTY)
    with pytest.raises(UnavailableError):
        new.acquire()
    assert lane.call(kit.SUM, 2, [], kit.NUMBER) == [0]  # who was there is served
    old.release(lane)
    new.close()
    server.request("threads")
    late = kit.make_peer(lambda timeout: server.endpoint, options=PATIENT)
    late.release(late.acquire())
    late.close()
    old.close()
    until(lambda: server.request("counters")[0] == 0)
    assert server.request("counters")[0] == 0  # none is left half made


def test_client_enters_when_threads_return(server: LimitedServer) -> None:
    """A client that waits is let in when the server has threads again."""
    accepted = server.request("counters")[1]
    server.request("no threads")
    peer = kit.make_peer(lambda timeout: server.endpoint, options=PATIENT)
    thread = kit.in_thread(peer.acquire)
    until(lambda: server.request("counters")[1] > accepted)
    server.request("threads")
    lane = thread.result(100)
    assert lane.call(kit.SUM, 1, [], kit.NUMBER) == [0]
    peer.release(lane)
    peer.close()


if __name__ == "__main__":
    main()
