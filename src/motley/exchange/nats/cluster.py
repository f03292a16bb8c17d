"""Cluster: several servers that keep one log together: what each is told of the others, and how
they know each other.

The links between them, called routes, are TLS both ways: each node shows a certificate that the
hub's own authority issued, and takes no other. A shared secret stands behind that.
"""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from motley.clock import Clock, RealClock
from motley.files import replace

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, CertificateBuilder

ROUTES_ABOVE = 2000  # a node's port for the others, above that for peers: 6222 beside 4222
HANDSHAKE_S = 10  # between two nodes, of which one may be busy
YEARS = 10
_USER = "node"


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One server of a cluster."""

    number: int  # from 1
    name: str  # under which peers and the other nodes reach it
    host: str  # where it listens
    port: int  # for peers
    route_port: int  # for the other nodes
    here: bool = True  # on the hub's machine


@dataclass(frozen=True, slots=True)
class NodePass:
    """What lets a node in among the others: files of the authority, of its certificate and key."""

    authority: Path
    certificate: Path
    key: Path
    secret: str


@dataclass(frozen=True, slots=True)
class Cluster:
    """A node's view of it."""

    crew: str
    me: Node
    nodes: tuple[Node, ...]
    shown: NodePass

    @property
    def server_name(self) -> str:
        return server_name(self.crew, self.me.number)

    def settings(self) -> dict[str, Any]:
        """The part of a server's configuration. Peers know all nodes from their invitation, so
        nothing is advertised to them: a server would name addresses that they cannot reach.
        """
        return {
            "name": f"motley-{self.crew}",
            "listen": f"{self.me.host}:{self.me.route_port}",
            "authorization": {
                "user": _USER,
                "password": self.shown.secret,
                "timeout": HANDSHAKE_S,
            },
            "tls": {
                "cert_file": str(self.shown.certificate),
                "key_file": str(self.shown.key),
                "ca_file": str(self.shown.authority),
                "verify": True,
                "timeout": HANDSHAKE_S,
            },
            "routes": [
                f"nats-route://{_USER}:{self.shown.secret}@{_in_url(node.name)}:{node.route_port}"
                for node in self.nodes
                if node.number != self.me.number
            ],
            "no_advertise": True,
        }


def server_name(crew: str, number: int) -> str:
    """By which the others know a node for ever: its share of the log is under it."""
    return f"motley-{crew}-{number}"


def address_of(nodes: tuple[Node, ...], scheme: str) -> str:
    return ",".join(f"{scheme}://{_in_url(node.name)}:{node.port}" for node in nodes)


def _in_url(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def issue_pass(folder: Path, node: Node, clock: Clock = RealClock()) -> NodePass:
    """A node's pass, made once; the first also makes authority and secret.

    FOLDER/secret, FOLDER/authority.pem, .key    of the cluster
    FOLDER/NUMBER-NAME.pem, .key                 of a node
    """
    folder.mkdir(parents=True, exist_ok=True)
    secret = folder / "secret"
    if not secret.exists():
        replace(secret, secrets.token_hex(32).encode(), mode=0o600)
    authority, authority_key = folder / "authority.pem", folder / "authority.key"
    if not authority.exists():
        _make_authority(authority, authority_key, clock)
    # of its name, too: a node that moved needs another
    stem = f"{node.number}-{node.name.replace(':', '_')}"
    certificate, key = folder / f"{stem}.pem", folder / f"{stem}.key"
    if not certificate.exists():
        _issue(certificate, key, node.name, (authority, authority_key), clock)
    return NodePass(authority, certificate, key, secret.read_text())


def _make_authority(certificate: Path, secret: Path, clock: Clock) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder("motley hub", key, clock).issuer_name(_named("motley hub"))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    _keep(builder.sign(key, hashes.SHA256()), certificate, key, secret)


def _issue(
    certificate: Path, secret: Path, name: str, authority: tuple[Path, Path], clock: Clock
) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    issuer = x509.load_pem_x509_certificate(authority[0].read_bytes())
    issuer_key = serialization.load_pem_private_key(authority[1].read_bytes(), None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    # a node dials others, and is dialled by them
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        _builder(name, key, clock)
        .issuer_name(issuer.subject)
        .add_extension(x509.SubjectAlternativeName([_general_name(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    )
    _keep(builder.sign(issuer_key, hashes.SHA256()), certificate, key, secret)


def _general_name(name: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _builder(name: str, key: EllipticCurvePrivateKey, clock: Clock) -> CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.fromtimestamp(clock.now_s(), datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
    )


def _named(name: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _keep(certificate: Certificate, path: Path, key: EllipticCurvePrivateKey, secret: Path) -> None:
    """The key first: a certificate that is there has one."""
    from cryptography.hazmat.primitives import serialization

    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    replace(secret, private, mode=0o600)
    replace(path, certificate.public_bytes(serialization.Encoding.PEM))
