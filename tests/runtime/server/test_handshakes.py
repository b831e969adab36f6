"""Many handshakes at once: each comes to its end, and the server outlives them, also while certificates change."""

import concurrent.futures
import pathlib
from collections import Counter

import pytest

from harness.certs import CA
from runtime.transport import diagnosis
from runtime.transport.security import VARIABLE, Security
from tests.kit import certificates
from tests.kit.waits import until
from tests.runtime import kit

pytestmark = pytest.mark.cluster

AT_ONCE = 24
HANDSHAKES = 3000


@pytest.mark.parametrize("replaced", [0, 5], ids=["as it is", "replaced meanwhile"])
def test_handshakes_at_once_do_not_disturb_each_other(tmp_path: pathlib.Path, replaced: int) -> None:
    """A server that was given its certificate for each handshake failed some, and ended by SIGABRT now and then."""
    authority = CA.make()
    directory = certificates.make(tmp_path / "certs", authority)
    ours = Security(certificates=certificates.make(tmp_path / "ours", authority)).tls()
    assert ours is not None
    spec = kit.addresses(ps=1)
    with kit.serve(spec, "ps", 0, env={VARIABLE: str(directory)}) as server:
        until(lambda: bool(diagnosis.look(spec["ps"][0], ours).certificate))
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            looks = [pool.submit(diagnosis.look, spec["ps"][0], ours, 60.0) for _ in range(HANDSHAKES)]
            for part in range(replaced):
                concurrent.futures.wait(looks[: HANDSHAKES * (part + 1) // (replaced + 1)])
                certificates.write(directory, "here", authority, certificates.pair_of(authority))
            problems = Counter(look.result().problem for look in looks)
        assert server.code is None, server.story()
        assert problems == {"": HANDSHAKES}
        assert all(look.result().names for look in looks)
