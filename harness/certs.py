r"""Certificates for a cluster of several hosts: ``python -m harness.certs --out=certs --hosts=ps0,w0,w1``.

Makes a CA (ca.pem, ca.key) and, for each host, a certificate and its key (NAME.pem, NAME.key) for
both sides of a connection. Each host needs ca.pem and its own two files. The file ca.key makes
further certificates and belongs on no host.

    python -m harness.certs --out=certs --hosts=ps0,w0,w1           # the CA, and three hosts
    python -m harness.certs --out=certs --hosts=w2,ps1+10.0.0.7     # ps1 has an address, too
    python -m harness.certs --out=certs --hosts=ps0,w0 --renew      # before the old ones expire
    python -m harness.certs --out=certs --hosts=w1,w2 --role=worker --tasks=worker/1,worker/2
    python -m harness.certs --out=certs --hosts=alice --role=observer

A certificate without --role allows everything. A certificate with a role allows the orders of the
role (docs/roles.md). Give the directory to tasks and clients by BELLWETHER_SECURITY=certs in
their environment. The MNIST trainer and harness.status have the flag --security=certs, too.
"""

import datetime
import ipaddress
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from harness.command_line import ToolParser
from runtime import concurrency

AUTHORITY = "ca"
"""Name of the files of the CA, without suffix."""
AUTHORITY_DAYS = 3650.0
DAYS = 365.0
# The clocks of hosts differ. A certificate that begins now would not have begun on a host with a
# slow clock.
_EARLIER = datetime.timedelta(hours=1)
_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
_LOOPBACK = ("127.0.0.1", "::1")
# RFC 5280 limits the common name. Nothing is lost, as clients check the alternative names only.
_LONGEST_COMMON_NAME = 64
_USAGE_ERROR = 2
CLIENTS = ("observer", "admin")
"""Roles of clients that are no task."""
ROLES = ("worker", "chief", "ps", *CLIENTS)
RUN = "bellwether"
"""Default run of certificates with a role."""
_SAID = re.compile(
    rf"bellwether://[A-Za-z0-9._-]{{1,64}}/({'|'.join(ROLES)})(/[A-Za-z0-9_.-]{{1,64}}/[0-9]{{1,9}})?"
)


class CertificateError(Exception):
    """An error in a request for certificates. The message is one line and names the remedy."""


@dataclass(frozen=True)
class CA:
    """A certificate authority, which signs the certificates of one cluster.

    Attributes:
        certificate: Certificate of the CA.
        key: Key with which the CA signs.
    """

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls, days: float = AUTHORITY_DAYS) -> "CA":
        """Makes a new CA.

        Args:
            days: Days until the end of the CA's certificate.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        # The number tells two CAs of one user apart.
        name = _common_name(f"Bellwether CA {concurrency.random_hex(4)}")
        end = now + datetime.timedelta(days=days)
        constraints, usage = (
            x509.BasicConstraints(ca=True, path_length=0),
            _key_usage(signs_certificates=True),
        )
        certificate = _sign_certificate(
            key, name, name, key, now - _EARLIER, end, [constraints, usage]
        )
        return cls(certificate, key)

    @classmethod
    def load(cls, directory: Path) -> "CA":
        """Reads the CA of a directory.

        Args:
            directory: Directory with the files of the CA.

        Raises:
            CertificateError: The directory has no CA, or key and certificate are unreadable or do
                not belong together.
        """
        try:
            certificate = x509.load_pem_x509_certificate(
                (directory / f"{AUTHORITY}.pem").read_bytes()
            )
            key = serialization.load_pem_private_key(
                (directory / f"{AUTHORITY}.key").read_bytes(), None
            )
        except OSError as error:
            raise CertificateError(
                f"{error.filename}: {error.strerror}: hosts are added where {AUTHORITY}.pem and "
                f"{AUTHORITY}.key are"
            ) from None
        except (ValueError, TypeError) as error:
            raise CertificateError(f"{directory} has a CA that cannot be read: {error}") from None
        if (
            not isinstance(key, ec.EllipticCurvePrivateKey)
            or key.public_key() != certificate.public_key()
        ):
            raise CertificateError(f"{directory / AUTHORITY}.key is not the key of {AUTHORITY}.pem")
        return cls(certificate, key)

    def pem(self) -> tuple[bytes, bytes]:
        """Returns the key and the certificate as PEM."""
        return _pem_pair(self.key, self.certificate)

    def issue(
        self,
        names: Sequence[str],
        end: datetime.datetime,
        begin: datetime.datetime | None = None,
        role: str = "",
    ) -> tuple[bytes, bytes]:
        """Makes a key, and a certificate for both sides of a connection.

            key, certificate = CA.make().issue(["ps0", "10.0.0.7"], end)

        The certificate of an observer or admin is for the client's side only.

        Args:
            names: Host names and addresses, one at least.
            end: End of the certificate, at the latest the end of the CA.
            begin: Begin of the certificate; an hour ago by default.
            role: ``bellwether://RUN/ROLE/JOB/INDEX``, or an empty text. Without a role the holder
                may give all orders. With a role the certificate also has a DNS name for each task
                as which the holder may serve, and clients check the name.

        Returns:
            The key and the certificate, as PEM.
        """
        assert names, "clients check a name"
        key = ec.generate_private_key(ec.SECP256R1())
        begin = begin or datetime.datetime.now(datetime.UTC) - _EARLIER
        # A certificate that outlives its CA is refused all the same.
        end = min(end, self.certificate.not_valid_after_utc)
        # Nobody can serve as a task with the certificate of an observer or admin.
        sides = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if not set(role.split("/")[3:4]) & set(CLIENTS):
            sides.append(ExtendedKeyUsageOID.SERVER_AUTH)
        general = list(map(_alternative_name, names))
        if role:
            # The import of the runtime takes a second, and certificates without a role need nothing
            # of the runtime.
            from runtime.lowlevel import server_names

            general += [
                *map(x509.DNSName, server_names(role)),
                x509.UniformResourceIdentifier(role),
            ]
        extensions = [
            x509.BasicConstraints(ca=False, path_length=None),
            _key_usage(signs_certificates=False),
            x509.ExtendedKeyUsage(sides),
            x509.SubjectAlternativeName(general),
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()),
        ]
        issuer, subject = self.certificate.subject, _common_name(names[0])
        return _pem_pair(
            key, _sign_certificate(self.key, issuer, subject, key, begin, end, extensions)
        )


def parse_hosts(text: str) -> list[list[str]]:
    """Returns the names of each host in ``--hosts``.

        >>> parse_hosts("ps0,w0+10.0.0.7")
        [['ps0'], ['w0', '10.0.0.7']]

    Raises:
        CertificateError: There is no host, a host comes twice or is named as the CA, or a name is
            neither a host name nor an address.
    """
    hosts = [[name.strip() for name in host.split("+")] for host in text.split(",") if host.strip()]
    if not hosts:
        raise CertificateError(
            "--hosts names no host: give the hosts of the cluster, as in --hosts=ps0,w0,w1"
        )
    for names in hosts:
        for name in names:
            if not _is_address(name) and not _HOST.fullmatch(name):
                raise CertificateError(
                    f"--hosts: {name!r} is no host name and no address (ports do not belong to it)"
                )
        # The first name becomes the name of the files, and would replace those of the CA.
        if names[0] == AUTHORITY:
            raise CertificateError(
                f"--hosts: {AUTHORITY} is the name of the CA's own files: give that host another "
                "first"
            )
    first = [names[0] for names in hosts]
    if twice := sorted({name for name in first if first.count(name) > 1}):
        raise CertificateError(f"--hosts names {', '.join(twice)} twice")
    return hosts


def parse_roles(role: str, run: str, tasks: str, hosts: int) -> list[str]:
    """Returns the role in the certificate of each host: ``bellwether://RUN/ROLE/JOB/INDEX``, or an empty text.

        >>> parse_roles("worker", "", "worker/1", hosts=1)
        ['bellwether://bellwether/worker/worker/1']

    Args:
        role: ``--role``; empty for none.
        run: ``--run``; empty for the default.
        tasks: ``--tasks``, such as ``worker/1,worker/2``; empty for any task of the role.
        hosts: Number of hosts.

    Raises:
        CertificateError: A role, run or task is invalid, or the number of tasks is not that of the
            hosts.
    """
    if not role:
        if tasks or run:
            raise CertificateError("--tasks and --run go with a --role")
        return [""] * hosts
    base = f"bellwether://{run or RUN}/{role}"
    if tasks and role in CLIENTS:
        raise CertificateError(f"--tasks: a certificate of the role {role} is that of no task")
    said = [f"{base}/{task.strip()}" for task in tasks.split(",")] if tasks else [base] * hosts
    if len(said) != hosts:
        raise CertificateError(
            f"--tasks names {len(said)} tasks and --hosts {hosts} hosts: give one for each"
        )
    for text in said:
        if not _SAID.fullmatch(text):
            form = f"bellwether://RUN/ROLE/JOB/INDEX, where --role is one of {', '.join(ROLES)}"
            raise CertificateError(
                f"--run, --role and --tasks make {text}, which is not of the form {form}"
            )
    return said


def make_certificates(
    out: Path, hosts: Sequence[Sequence[str]], days: float, renew: bool, roles: Sequence[str] = ()
) -> datetime.datetime:
    """Makes a certificate for each host, and the CA if the directory has none.

    Args:
        out: Directory for the files. A missing directory is made, for this user alone.
        hosts: Names of each host. The first name of a host is the name of its files.
        days: Days until the end of the certificates.
        renew: True replaces existing certificates of the hosts.
        roles: Role of each host, from ``parse_roles``; no roles by default.

    Returns:
        The end of the certificates.

    Raises:
        CertificateError: A certificate exists already and ``renew`` is False, or the CA is
            unreadable or has ended.
    """
    files = {
        names[0]: [out / f"{names[0]}{ending}" for ending in (".key", ".pem")] for names in hosts
    }
    # All hosts are checked before the first file is written, so a refused call changes nothing.
    there = [name for name, paths in files.items() if any(path.exists() for path in paths)]
    if there and not renew:
        raise CertificateError(
            f"{out} has certificates of {', '.join(there)}, which stay: --renew replaces them"
        )
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = [out / f"{AUTHORITY}.key", out / f"{AUTHORITY}.pem"]
    if any(path.exists() for path in own):
        authority = CA.load(out)
    else:
        authority = CA.make()
        _write_pair(authority.pem(), own)
    now = datetime.datetime.now(datetime.UTC)
    if authority.certificate.not_valid_after_utc <= now:
        raise CertificateError(f"the CA of {out} has ended: make another one in a fresh directory")
    end = min(now + datetime.timedelta(days=days), authority.certificate.not_valid_after_utc)
    for names, role in zip(hosts, roles or [""] * len(hosts), strict=True):
        # Clients of a task at "localhost" connect to 127.0.0.1, and check the certificate for this
        # address.
        loopback = _LOOPBACK if "localhost" in names else ()
        _write_pair(
            authority.issue(list(dict.fromkeys([*names, *loopback])), end, role=role),
            files[names[0]],
        )
    return end


def what_next(out: Path, hosts: Sequence[Sequence[str]], end: datetime.datetime) -> str:
    """Returns instructions for the user's next steps, in a few lines.

    Args:
        out: Directory with the files.
        hosts: Names of each host.
        end: End of the certificates.
    """
    name = hosts[0][0]
    listed = ",".join("+".join(names) for names in hosts)
    return f"""{out} has certificates of {", ".join(names[0] for names in hosts)}, good until {end:%Y-%m-%d}.
Next:
1. Copy {AUTHORITY}.pem and its own two files to each host, and nothing else, as in
       scp -p {out}/{AUTHORITY}.pem {out}/{name}.pem {out}/{name}.key {name}:certs/
   {AUTHORITY}.key makes further certificates: keep it where only you can read it.
2. Start every task and every client (harness.status, too) with BELLWETHER_SECURITY=certs in its environment.
   (The MNIST trainer and harness.status take --security=certs as well.)
3. Before {end:%Y-%m-%d}, renew and copy again; what is running takes the new files up by itself:
       python -m harness.certs --out={out} --hosts={listed} --renew"""


def _write_pair(contents: tuple[bytes, bytes], paths: Sequence[Path]) -> None:
    # The key comes first, because a running task takes a certificate without its key for a broken
    # pair.
    for content, path, mode in zip(contents, paths, (0o600, 0o644), strict=True):
        # A running task may read at any moment, so each file is replaced as a whole.
        fd, fresh = tempfile.mkstemp(dir=path.parent, prefix=".new")
        try:
            with os.fdopen(fd, "wb") as file:
                os.fchmod(fd, mode)
                file.write(content)
            os.replace(fresh, path)
        except BaseException:
            os.unlink(fresh)
            raise


def _sign_certificate(
    signer: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    begin: datetime.datetime,
    end: datetime.datetime,
    extensions: Sequence[x509.ExtensionType],
) -> x509.Certificate:
    builder = (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(key.public_key())
    )
    builder = (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
    )
    for extension in (*extensions, x509.SubjectKeyIdentifier.from_public_key(key.public_key())):
        # RFC 5280 (4.2.1.3 and 4.2.1.9) has these two critical: software that does not know them
        # must refuse.
        critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer, hashes.SHA256())


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:_LONGEST_COMMON_NAME])])


def _alternative_name(name: str) -> x509.GeneralName:
    return (
        x509.IPAddress(ipaddress.ip_address(name))
        if _is_address(name)
        else x509.DNSName(name.rstrip("."))
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _pem_pair(
    key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
) -> tuple[bytes, bytes]:
    plain = serialization.NoEncryption()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)


def _parse_days(text: str) -> float:
    days = float(text)
    if not 0 < days <= AUTHORITY_DAYS:
        raise ValueError
    return days


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the certificates of a command line and prints the next steps.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        The exit code: 0, 1 if a file cannot be written, 2 for an impossible request.
    """
    parser = ToolParser("harness.certs", __doc__ or "")
    parser.add_argument(
        "--out", required=True, type=Path, help="directory for the files; made if it is not there"
    )
    parser.add_argument(
        "--hosts",
        required=True,
        help="hosts with commas between them, by the names or addresses that the tasks of the cluster have, without "
        "ports; further names of one host follow it with a +, as in ps1+10.0.0.7",
    )
    parser.add_argument(
        "--days",
        type=_parse_days,
        default=DAYS,
        help=f"how long the certificates hold; {DAYS:.0f} by default",
    )
    parser.add_argument(
        "--role",
        default="",
        help=f"what these hosts are: {', '.join(ROLES)}; without one, their certificates are good for everything",
    )
    parser.add_argument(
        "--tasks",
        default="",
        help="with --role, the task that each host is, as in worker/1,worker/2; else it may be any of its role",
    )
    parser.add_argument(
        "--run", default="", help="with --role, the run it is for; tasks refuse those of another"
    )
    parser.add_argument(
        "--renew", action="store_true", help="replace certificates of these hosts that are there"
    )
    options = parser.parse_args(argv)
    try:
        hosts = parse_hosts(options.hosts)
        roles = parse_roles(options.role, options.run, options.tasks, len(hosts))
        end = make_certificates(options.out, hosts, options.days, options.renew, roles)
    except CertificateError as error:
        print(f"harness.certs: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except OSError as error:
        print(
            f"harness.certs: {error.filename or options.out}: {error.strerror or error}",
            file=sys.stderr,
        )
        return 1
    print(what_next(options.out, hosts, end))
    return 0


if __name__ == "__main__":
    sys.exit(main())
