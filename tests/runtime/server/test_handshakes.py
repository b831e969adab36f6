"""Many handshakes at once: each comes to its end, and the server outlives them, also while certificates change."""

import concurrent.futures
import contextlib
import pathlib
import select
import socket
from collections import Counter

import pytest

import runtime as rt
from harness.certs import CA
from runtime.cluster.spec import split_address
from runtime.trust import diagnosis
from runtime.trust.security import VARIABLE, Security
from tests.kit import certificates
from tests.kit.waits import until
from tests.runtime import kit

pytestmark = pytest.mark.cluster

AT_ONCE = 24
HANDSHAKES = 3000
ROOM = 4


@pytest.mark.parametrize("replaced", [0, 5], ids=["as it is", "replaced meanwhile"])
def test_concurrent_handshakes_are_independent(tmp_path: pathlib.Path, replaced: int) -> None:
    """Many handshakes at once succeed, also while the certificate is replaced."""
    authority = CA.make()
    directory = certificates.make(tmp_path / "certs", authority)
    ours = Security(certificates=certificates.make(tmp_path / "ours", authority)).tls()
    assert ours is not None
    spec = kit.addresses(ps=1)
    with kit.serve(spec, "ps", 0, env={VARIABLE: str(directory)}) as server:
        until(lambda: diagnosis.look(spec["ps"][0], ours).answered)
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            looks = [
                pool.submit(diagnosis.look, spec["ps"][0], ours, "", 60.0)
                for _ in range(HANDSHAKES)
            ]
            for part in range(replaced):
                concurrent.futures.wait(looks[: HANDSHAKES * (part + 1) // (replaced + 1)])
                certificates.write(directory, "here", authority, certificates.pair_of(authority))
            problems = Counter(look.result().problem for look in looks)
        assert server.code is None, server.story()
        assert problems == {None: HANDSHAKES}
        assert all(look.result().answered for look in looks)


def test_full_server_refuses_as_unavailable(
    tmp_path: pathlib.Path,
) -> None:
    """A client that finds no room is UnavailableError and not a question of its certificate."""
    security = Security(certificates=certificates.make(tmp_path / "certs"))
    spec = kit.addresses(ps=1)
    (address,) = spec["ps"]
    env = {
        VARIABLE: str(security.certificates),
        "BELLWETHER_LIMITS": f"connections={4 * ROOM},hello_secs=120",
    }
    with kit.serve(spec, "ps", 0, env=env) as server, contextlib.ExitStack() as silent:
        until(lambda: answers(address, security))
        fill(address, silent)
        with pytest.raises(rt.UnavailableError, match="hangs up at once") as caught:
            rt.probe(address, 20, security=security)
        assert "\n" not in caught.value.message
        waits = rt.SessionConfig(start_timeout_secs=1)
        with pytest.raises(rt.DeadlineExceededError):  # not before its time
            rt.Session(f"grpc://{address}", rt.Graph(), waits, security=security)
        silent.close()
        until(lambda: answers(address, security))
        assert server.code is None


def answers(address: str, security: Security) -> bool:
    """Whether a task has room for us."""
    with contextlib.suppress(rt.UnavailableError):
        rt.probe(address, 20, security=security)
        return True
    return False


def fill(address: str, silent: contextlib.ExitStack) -> None:
    """Connects and says nothing until all the room is ours: a connection of before may have some for a moment."""
    ours: list[socket.socket] = []

    def full() -> bool:
        sock = socket.create_connection(split_address(address))
        if not hung_up(sock, 0.3):
            ours.append(silent.enter_context(sock))
            return False
        sock.close()
        # they came before, so it has decided on them too
        ours[:] = [one for one in ours if not hung_up(one, 0.0)]
        return len(ours) == ROOM

    until(full)


def hung_up(sock: socket.socket, secs: float) -> bool:
    """Whether the server, which says nothing first, hangs up within so many seconds."""
    return bool(select.select([sock], [], [], secs)[0])
