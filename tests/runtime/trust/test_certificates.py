"""Which files are a process's own, that they are read again when they change, and what is wrong with bad ones."""

import logging
import os
import pathlib
import socket
import ssl
import time

import pytest

import runtime as rt
from harness.certs import CA
from runtime.errors import InvalidArgumentError, UnauthenticatedError
from runtime.trust.certificates import Certificates, choose, is_near_end, words
from runtime.trust.security import VARIABLE, Security, in_force, share
from tests.kit.certificates import make, pair_of, write
from tests.runtime import kit

DAY = 86400.0


@pytest.fixture(scope="module")
def authority() -> CA:
    return CA.make()


# -- what Security takes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"token_file": "a", "certificates": "b"},
        {"token_file": "a", "lets_everybody_in": True},
        {"certificates": "a", "lets_everybody_in": True},
        {"token_file": "a", "host": "ps0"},
        {"lets_everybody_in": True, "host": "ps0"},
        {"token_file": ""},
        {"certificates": ""},
    ],
)
def test_security_is_one_thing(arguments: dict[str, object]) -> None:
    """Security takes exactly one way, and a host only with certificates."""
    with pytest.raises(InvalidArgumentError, match="Security"):
        Security(**arguments)  # type: ignore[arg-type]


def test_security_is_read_from_text(tmp_path: pathlib.Path) -> None:
    """Security in text is a directory, a file or the word insecure."""
    assert Security.from_text(str(tmp_path)) == Security(certificates=str(tmp_path))
    assert Security.from_text(str(tmp_path / "token")) == Security(str(tmp_path / "token"))
    assert Security.from_text("insecure") == Security.insecure()
    assert Security.from_environ({}) is None and Security.from_environ({VARIABLE: ""}) is None
    assert Security.from_environ({VARIABLE: "insecure"}) == Security.insecure()


def test_given_security_precedes_environment() -> None:
    """A given security precedes the environment's, which precedes that of the process's server."""
    given, named, served = Security("given"), {VARIABLE: "named"}, Security("served")
    assert in_force(None, {}) is None
    unshare = share(served)
    try:
        assert in_force(None, {}) == served
        assert in_force(None, named) == Security("named")
        assert in_force(given, named) == given
    finally:
        unshare()
    assert in_force(None, {}) is None


def test_host_chooses_unless_chosen() -> None:
    """A server's host chooses the certificate unless a host was chosen."""
    assert Security(certificates="a").of_host("ps0") == Security(certificates="a", host="ps0")
    assert Security(certificates="a", host="w0").of_host("ps0").host == "w0"
    assert Security(certificates="a").of_host("localhost").host == "127.0.0.1"
    assert Security("token").of_host("ps0") == Security("token")


# -- which files -----------------------------------------------------------------------------------------------


@pytest.fixture
def several(tmp_path: pathlib.Path, authority: CA) -> pathlib.Path:
    for name, names in {
        "ps0": ["ps0", "10.0.0.7"],
        "w0": ["w0", "worker.example"],
        "fd00::2": ["fd00::2"],
    }.items():
        write(tmp_path, name, authority, pair_of(authority, names))
    return tmp_path


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("ps0", "ps0"),
        ("10.0.0.7", "ps0"),
        ("w0", "w0"),
        ("Worker.Example", "w0"),
        ("fd00::2", "fd00::2"),
        ("fd00:0::2", "fd00::2"),
    ],
)
def test_task_finds_its_hosts_pair(several: pathlib.Path, host: str, expected: str) -> None:
    """A task finds the certificate of its host by name or address."""
    assert choose(several, host) == (several / f"{expected}.pem", several / f"{expected}.key")


def test_missing_pair_says_its_command(several: pathlib.Path) -> None:
    """A host without a certificate is told the command that makes one."""
    with pytest.raises(UnauthenticatedError) as caught:
        choose(several, "w9")
    said = str(caught.value)
    assert (
        "fd00::2, ps0, w0 and none of w9" in said
        and f"harness.certs --out={several} --hosts=w9" in said
    )
    assert "\n" not in said


def test_client_takes_its_machines_pair(
    several: pathlib.Path, authority: CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client takes the certificate of its machine, or any."""
    assert choose(several, None).certificate.parent == several
    monkeypatch.setattr(socket, "gethostname", lambda: "w0.cluster.local")
    assert choose(several, None).certificate.stem == "w0"


def test_lone_pair_serves_every_host(tmp_path: pathlib.Path, authority: CA) -> None:
    """A directory with one certificate serves every host."""
    make(tmp_path, authority, ["something"])
    assert choose(tmp_path, "ps0").certificate.stem == "here"


LAYOUTS = {
    "ours": ("ps0.pem", "ps0.key", "ca.pem"),
    "cert-manager": ("tls.crt", "tls.key", "ca.crt"),
    "spiffe-helper": ("svid.pem", "svid_key.pem", "svid_bundle.pem"),
    "spire-agent": ("svid.0.pem", "svid.0.key", "bundle.0.pem"),
}


def lay(directory: pathlib.Path, layout: str, authority: CA, ends: float = DAY) -> None:
    key, pem = pair_of(authority, ["ps0"], ends=ends)
    for name, content in zip(LAYOUTS[layout], (pem, key, authority.pem()[1]), strict=True):
        (directory / name).touch(mode=0o600)
        (directory / name).write_bytes(content)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mounted_files_are_recognised(tmp_path: pathlib.Path, layout: str, authority: CA) -> None:
    """Certificates with the names of common tools are recognised."""
    lay(tmp_path, layout, authority)
    found = Certificates(tmp_path, "ps0")
    assert found.pair == (tmp_path / LAYOUTS[layout][0], tmp_path / LAYOUTS[layout][1])
    assert 0.9 * DAY < found.left_secs() <= DAY


def test_volume_is_replaced_as_whole(tmp_path: pathlib.Path, authority: CA) -> None:
    """A certificate behind Kubernetes' links is replaced as a whole."""
    for number, ends in enumerate((DAY, 2 * DAY)):
        (tmp_path / f"..{number}").mkdir()
        lay(tmp_path / f"..{number}", "cert-manager", authority, ends)
    (tmp_path / "..data").symlink_to("..0")
    for name in LAYOUTS["cert-manager"]:
        (tmp_path / name).symlink_to(f"..data/{name}")
    found = Certificates(tmp_path, "ps0")
    assert found.left_secs() <= DAY
    (tmp_path / "..new").symlink_to("..1")
    os.replace(tmp_path / "..new", tmp_path / "..data")
    assert found.left_secs() > DAY


# -- what is wrong ---------------------------------------------------------------------------------------------


def no_directory(directory: pathlib.Path, authority: CA) -> None:
    directory.rename(directory.with_name("elsewhere"))


def no_authority(directory: pathlib.Path, authority: CA) -> None:
    (directory / "ca.pem").unlink()


def no_pair(directory: pathlib.Path, authority: CA) -> None:
    (directory / "here.key").unlink()


def anothers_key(directory: pathlib.Path, authority: CA) -> None:
    (directory / "here.key").write_bytes(pair_of(authority)[0])


def no_certificate(directory: pathlib.Path, authority: CA) -> None:
    (directory / "here.pem").write_text("nonsense")


def no_authority_inside(directory: pathlib.Path, authority: CA) -> None:
    (directory / "ca.pem").write_text("nonsense")


def open_key(directory: pathlib.Path, authority: CA) -> None:
    (directory / "here.key").chmod(0o644)


def locked_key(directory: pathlib.Path, authority: CA) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key((directory / "here.key").read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    (directory / "here.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (no_directory, "has no certificate of a CA .*harness.certs"),
        (no_authority, "has no certificate of a CA .*ca.pem, ca.crt.*harness.certs"),
        (
            no_pair,
            "has no certificate with a key that this user can read, as NAME.pem and NAME.key",
        ),
        (
            anothers_key,
            "here.pem, here.key and ca.pem do not make a credential: KEY_VALUES_MISMATCH",
        ),
        (no_certificate, "do not make a credential"),
        (no_authority_inside, "do not make a credential"),
        (open_key, "others can read the key in .*here.key: chmod 600"),
        (locked_key, "the key is encrypted"),
    ],
)
def test_bad_files_are_one_line(
    tmp_path: pathlib.Path, authority: CA, spoil: object, message: str
) -> None:
    """Files that make no credential are refused in one line with the reason."""
    directory = make(tmp_path / "certs", authority)
    spoil(directory, authority)  # type: ignore[operator]
    with pytest.raises(UnauthenticatedError, match=message) as caught:
        Certificates(directory, "localhost")
    assert "\n" not in str(caught.value)


# -- files that change -----------------------------------------------------------------------------------------


def put(directory: pathlib.Path, name: str, content: bytes) -> None:
    (directory / ".new").touch(mode=0o600)
    (directory / ".new").write_bytes(content)
    os.replace(directory / ".new", directory / name)


def test_changed_files_are_read_again(tmp_path: pathlib.Path, authority: CA) -> None:
    """Certificates are read again only when their files have changed."""
    directory = make(tmp_path / "certs", authority)
    found = Certificates(directory, "localhost")
    first = found.current
    assert found.current is first and found.server_context() is first.server
    write(directory, "here", authority, pair_of(authority, ends=2 * DAY))
    second = found.current
    assert (
        second is not first and second.end > first.end and found.client_context() is second.client
    )


def test_half_replaced_pair_is_not_used(
    tmp_path: pathlib.Path, authority: CA, caplog: pytest.LogCaptureFixture
) -> None:
    """A half-replaced certificate is not used, and the one before stays with one log line."""
    caplog.set_level(logging.INFO)
    directory = make(tmp_path / "certs", authority)
    found = Certificates(directory, "localhost")
    first = found.current
    key, pem = pair_of(authority, ends=2 * DAY)
    put(directory, "here.key", key)
    assert found.current is first and found.current is first
    said = [
        r.getMessage()
        for r in caplog.records
        if "going on with the certificate of before" in r.getMessage()
    ]
    assert len(said) == 1 and "MISMATCH" in said[0]  # once for each change
    put(directory, "here.pem", pem)
    assert found.current.end > first.end
    (directory / "ca.pem").unlink()  # and while one is missing
    assert found.current.end > first.end


def test_change_spares_open_connections(tmp_path: pathlib.Path, authority: CA) -> None:
    """A connection outlives the change of the certificate, and the next one shows the new
    certificate.
    """
    directory = make(tmp_path / "certs", authority)
    found = Certificates(directory, "localhost")
    shown = []
    pairs = []
    for ends in (DAY, 2 * DAY):
        write(directory, "here", authority, pair_of(authority, ends=ends))
        ours, theirs = socket.socketpair()
        client = found.client_context().wrap_socket(
            ours, server_hostname="localhost", do_handshake_on_connect=False
        )
        server = found.server_context().wrap_socket(
            theirs, server_side=True, do_handshake_on_connect=False
        )
        shake(client, server)
        shown.append(client.getpeercert(binary_form=True))
        pairs.append((client, server))
    assert shown[0] != shown[1]
    for client, server in pairs:
        client.sendall(b"still")
        assert server.recv(10) == b"still"
        client.close()
        server.close()


def shake(client: ssl.SSLSocket, server: ssl.SSLSocket) -> None:
    client.setblocking(False)
    server.setblocking(False)
    left = {client, server}
    while left:
        for sock in list(left):
            try:
                sock.do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                continue
            left.discard(sock)
    client.setblocking(True)
    server.setblocking(True)


# -- the end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("life", "left", "near"),
    [
        (365 * DAY, 8 * DAY, False),
        (365 * DAY, 6 * DAY, True),
        (30 * DAY, 4 * DAY, False),
        (30 * DAY, 2 * DAY, True),
        (3600, 400, False),
        (3600, 300, True),
        (DAY, -5, True),
    ],
)
def test_end_is_near_at_limits(life: float, left: float, near: bool) -> None:
    """The end of a certificate is near at a tenth of its life or seven days."""
    assert is_near_end(1000.0, 1000.0 + life, 1000.0 + life - left) == near


def test_near_end_is_logged_hourly(
    tmp_path: pathlib.Path,
    authority: CA,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The near end of a certificate is logged once an hour, and so is its end."""
    found = Certificates(
        make(tmp_path / "certs", authority, begins=-9 * DAY, ends=DAY / 2), "localhost"
    )
    now = time.monotonic()
    monkeypatch.setattr("runtime.concurrency.monotonic", lambda: now)
    for _ in range(3):
        found.tell_near_end("/job:ps/task:0")
    assert [r.getMessage() for r in caplog.records if "ends in 12 hours" in r.getMessage()] != []
    assert len(caplog.records) == 1
    now += 3601
    monkeypatch.setattr("runtime.concurrency.wall_time", lambda: found.current.end + 1)
    found.tell_near_end("/job:ps/task:0")
    assert "has ended" in caplog.records[-1].getMessage() and len(caplog.records) == 2


def test_early_certificate_mentions_clocks(tmp_path: pathlib.Path, authority: CA) -> None:
    """A certificate that is not yet valid mentions the clock of the machine."""
    with pytest.raises(
        UnauthenticatedError, match=r"begins 20.*is the clock of this machine right"
    ):
        Certificates(make(tmp_path / "certs", authority, begins=3600), "localhost")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(10 * DAY, "10 days"), (DAY, "24 hours"), (7200, "2 hours"), (90, "90 seconds"), (0.4, "0 s")],
)
def test_times_in_words(seconds: float, said: str) -> None:
    """A time is told in its largest fitting unit."""
    assert words(seconds).startswith(said)


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_directory_others_write_is_refused(
    tmp_path: pathlib.Path, mode: int, authority: CA
) -> None:
    """A directory or CA that other users can write is refused."""
    directory = make(tmp_path / "certs", authority)
    directory.chmod(mode)
    if mode == 0o775:
        if os.geteuid() != 0:
            pytest.skip("only root can give a directory to a group of others")
        os.chown(directory, -1, 65534)
    with pytest.raises(
        UnauthenticatedError, match=r"others can write .*certs \(mode 0.*chmod go-w"
    ):
        Certificates(directory)
    directory.chmod(0o700)
    tmp_path.chmod(0o777)
    with pytest.raises(UnauthenticatedError, match="others can write"):
        Certificates(directory)
    tmp_path.chmod(0o1777)
    Certificates(directory)
    (directory / "ca.pem").chmod(0o666)
    with pytest.raises(UnauthenticatedError, match="others can write .*ca.pem"):
        Certificates(directory)


def test_replaced_ca_is_not_taken(
    tmp_path: pathlib.Path, authority: CA, caplog: pytest.LogCaptureFixture
) -> None:
    """A CA that other users may have put into a running task's directory is not taken."""
    directory = make(tmp_path / "certs", authority)
    spec = kit.addresses(ps=1)
    attacker = make(tmp_path / "attacker")
    chosen = (attacker / "ca.pem").read_bytes()
    (attacker / "ca.pem").write_bytes(chosen + authority.pem()[1])  # it takes any server
    foreign = Security(certificates=attacker)
    with rt.Server(spec, "ps", 0, security=Security(certificates=directory)) as server:
        kit.set_apart(server)
        directory.chmod(0o777)
        (directory / "ca.pem").unlink()
        (directory / "ca.pem").write_bytes(chosen)
        for _ in range(2):
            with pytest.raises(UnauthenticatedError):
                rt.probe(server.address, 60, security=foreign)
        assert (
            "going on with the certificate of before" in caplog.text
            and "others can write" in caplog.text
        )
        ours = Security(certificates=make(tmp_path / "ours", authority))
        assert rt.probe(server.address, 60, security=ours).task == "/job:ps/task:0"
