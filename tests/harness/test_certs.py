"""Certificates that ``python -m harness.certs`` makes: for whom, for how long, by whom they can be read."""

import datetime
import os
import pathlib
import stat
import subprocess
import sys

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from harness import certs
from tests.kit.processes import ROOT

pytestmark = pytest.mark.cluster


def make(out: pathlib.Path, *options: str) -> int:
    return certs.main([f"--out={out}", *options])


def load(path: pathlib.Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(path: pathlib.Path) -> list[str]:
    found = load(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [
        *found.get_values_for_type(x509.DNSName),
        *map(str, found.get_values_for_type(x509.IPAddress)),
    ]


def contents(out: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.parametrize(
    ("host", "file", "expected"),
    [
        ("ps0", "ps0", ["ps0"]),
        ("ps0.cluster.local", "ps0.cluster.local", ["ps0.cluster.local"]),
        ("10.0.0.7", "10.0.0.7", ["10.0.0.7"]),
        ("fd00::2", "fd00::2", ["fd00::2"]),
        ("ps1+10.0.0.7+ps1.example", "ps1", ["ps1", "ps1.example", "10.0.0.7"]),
        ("localhost", "localhost", ["localhost", "127.0.0.1", "::1"]),
    ],
)
def test_certificate_names_host_for_both(
    tmp_path: pathlib.Path, host: str, file: str, expected: list[str]
) -> None:
    """A certificate names its host and serves as server and as client."""
    assert make(tmp_path, f"--hosts={host}") == 0
    assert names(tmp_path / f"{file}.pem") == expected
    made, authority = load(tmp_path / f"{file}.pem"), load(tmp_path / "ca.pem")
    uses = made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(uses) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    made.verify_directly_issued_by(authority)
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    checked = subprocess.run(
        [
            "openssl",
            "verify",
            "-x509_strict",
            "-CAfile",
            tmp_path / "ca.pem",
            tmp_path / f"{file}.pem",
        ],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stderr


def test_keys_ignore_the_umask(tmp_path: pathlib.Path) -> None:
    """Keys are readable by their user alone, whatever the umask."""
    before = os.umask(0)
    try:
        assert make(tmp_path / "a" / "certs", "--hosts=ps0") == 0
    finally:
        os.umask(before)
    out = tmp_path / "a" / "certs"
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    assert {p.name: stat.S_IMODE(p.stat().st_mode) for p in out.iterdir()} == {
        "ca.key": 0o600,
        "ca.pem": 0o644,
        "ps0.key": 0o600,
        "ps0.pem": 0o644,
    }


def test_existing_certificates_stay(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Existing certificates stay, and hosts can be added."""
    assert make(tmp_path, "--hosts=ps0,w0") == 0
    before = contents(tmp_path)
    assert make(tmp_path, "--hosts=w1,ps0") == 2
    assert (
        "has certificates of ps0, which stay: --renew" in (told := capsys.readouterr().err)
        and told.count("\n") == 1
    )
    assert contents(tmp_path) == before
    assert make(tmp_path, "--hosts=w1") == 0
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before and set(after) - set(before) == {
        "w1.pem",
        "w1.key",
    }
    load(tmp_path / "w1.pem").verify_directly_issued_by(load(tmp_path / "ca.pem"))


def test_renew_replaces_named_hosts_only(tmp_path: pathlib.Path) -> None:
    """--renew replaces the certificates of the named hosts only."""
    assert make(tmp_path, "--hosts=ps0,w0") == 0
    before = contents(tmp_path)
    assert make(tmp_path, "--hosts=ps0", "--renew", "--days=3") == 0
    after = contents(tmp_path)
    assert {name for name in before if after[name] != before[name]} == {"ps0.pem", "ps0.key"}
    left = load(tmp_path / "ps0.pem").not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=2.9) < left <= datetime.timedelta(days=3)


def test_two_directories_have_two_authorities(tmp_path: pathlib.Path) -> None:
    """Two directories have two authorities."""
    for name in "ab":
        assert make(tmp_path / name, "--hosts=ps0") == 0
    one, other = (load(tmp_path / name / "ca.pem") for name in "ab")
    assert one.subject != other.subject and one.public_key() != other.public_key()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hosts="], "names no host"),
        (["--hosts=ps0:2222"], "'ps0:2222' is no host name and no address"),
        (["--hosts=ps0,-x"], "'-x' is no host name"),
        (["--hosts=../../etc"], "is no host name"),
        (["--hosts=ps0,w0,ps0"], "names ps0 twice"),
        (["--hosts=ca"], "name of the CA's own files"),
    ],
)
def test_impossible_certificates_are_one_line(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    """Hosts and options that cannot be served give one line and no directory."""
    assert make(tmp_path / "out", *options) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1 and not (tmp_path / "out").exists()


def test_adding_hosts_needs_the_key(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hosts are added only where the right key of the authority is."""
    assert make(tmp_path, "--hosts=ps0") == 0
    key = (tmp_path / "ca.key").read_bytes()
    (tmp_path / "ca.key").unlink()
    assert make(tmp_path, "--hosts=w0") == 2
    assert "ca.key: No such file or directory: hosts are added where" in capsys.readouterr().err
    assert make(tmp_path / "other", "--hosts=ps0") == 0
    (tmp_path / "other" / "ca.key").write_bytes(key)
    assert make(tmp_path / "other", "--hosts=w0") == 2
    assert "is not the key of ca.pem" in capsys.readouterr().err


def test_command_prints_the_next_steps(tmp_path: pathlib.Path) -> None:
    """The command prints the next steps, and its help shows an example."""
    command = [sys.executable, "-m", "harness.certs"]
    done = subprocess.run(
        [*command, f"--out={tmp_path}", "--hosts=ps0,w0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"scp -p {tmp_path}/ca.pem {tmp_path}/ps0.pem {tmp_path}/ps0.key ps0:" in done.stdout
    assert (
        "BELLWETHER_SECURITY=" in done.stdout
        and "--renew" in done.stdout
        and "ca.key" in done.stdout
    )
    shown = subprocess.run(
        [*command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert all(word in shown for word in ("--out", "--hosts", "--days", "--renew", "ps1+10.0.0.7"))


def test_certificate_holds_the_role(tmp_path: pathlib.Path) -> None:
    """A certificate holds its role, tasks and run, and fits the role's uses."""
    assert (
        make(
            tmp_path,
            "--hosts=w1,w2+10.0.0.2",
            "--role=worker",
            "--tasks=worker/1, worker/2",
            "--run=mnist",
        )
        == 0
    )
    assert make(tmp_path, "--hosts=ps0", "--role=ps") == 0
    assert make(tmp_path, "--hosts=alice", "--role=observer") == 0
    assert make(tmp_path, "--hosts=admin", "--role=admin") == 0

    def role(name: str) -> list[str]:
        found = (
            load(tmp_path / f"{name}.pem")
            .extensions.get_extension_for_class(x509.SubjectAlternativeName)
            .value
        )
        return found.get_values_for_type(x509.UniformResourceIdentifier)

    assert role("w1") == ["bellwether://mnist/worker/worker/1"]
    assert role("w2") == ["bellwether://mnist/worker/worker/2"]
    assert names(tmp_path / "w2.pem") == [
        "w2",
        "2.worker.mnist.bellwether",
        "mnist.bellwether",
        "10.0.0.2",
    ]
    assert names(tmp_path / "ps0.pem") == [
        "ps0",
        "*.ps.bellwether.bellwether",
        "bellwether.bellwether",
    ]
    assert names(tmp_path / "alice.pem") == ["alice"]
    assert role("ps0") == ["bellwether://bellwether/ps"]
    assert role("alice") == ["bellwether://bellwether/observer"]
    both = {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    for name, uses in (
        ("w1", both),
        ("ps0", both),
        ("alice", both - {ExtendedKeyUsageOID.SERVER_AUTH}),
    ):
        found = (
            load(tmp_path / f"{name}.pem")
            .extensions.get_extension_for_class(x509.ExtendedKeyUsage)
            .value
        )
        assert set(found) == uses


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--role=king"], "bellwether://bellwether/king, which is not of the form"),
        (["--tasks=ps/0"], "go with a --role"),
        (["--run=mnist"], "go with a --role"),
        (["--role=ps", "--tasks=ps/0,ps/1"], "names 2 tasks and --hosts 1 hosts"),
        (
            ["--role=ps", "--tasks=ps0"],
            "/ps/ps0, which is not of the form bellwether://RUN/ROLE/JOB/INDEX",
        ),
        (["--role=ps", "--run=a/b"], "bellwether://a/b/ps, which is not of the form"),
        (["--role=observer", "--tasks=ps/0"], "that of no task"),
    ],
)
def test_senseless_roles_are_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], options: list[str], why: str
) -> None:
    """Roles that make no sense are refused before a file is made."""
    assert make(tmp_path, "--hosts=h", *options) == 2
    assert why in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
