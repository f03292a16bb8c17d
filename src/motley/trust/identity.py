"""Identity: an ed25519 key that logs a peer in to the hub's server and signs its records.

The secret never leaves its file.

Text forms are NATS nkeys (SU... for the secret, U... for the public key), so that one key serves
both.
"""

from __future__ import annotations

import base64
import hashlib
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import nkeys
from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from motley.files import replace

MOST_KNOWN = 4096  # signatures that are not verified again


@dataclass(frozen=True, slots=True)
class Identity:
    secret: bytes = field(repr=False)
    public: bytes

    @staticmethod
    def of(secret: bytes) -> Identity:
        return Identity(secret, bytes(SigningKey(secret).verify_key))

    @staticmethod
    def new() -> Identity:
        return Identity.of(os.urandom(32))

    @staticmethod
    def kept_at(path: Path) -> Identity:
        """The identity of a file that only its owner may read; made if there is none."""
        if not path.exists():
            replace(path, Identity.new().nkey_seed.encode() + b"\n", mode=0o600)
        return Identity.from_nkey_seed(path.read_text(errors="replace").strip(), str(path))

    @staticmethod
    def from_nkey_seed(seed: str, where: str) -> Identity:
        try:
            found = Identity.of(bytes(nkeys.decode_seed(seed.encode())[1]))
            if found.nkey_seed != seed:
                raise ValueError("its checksum is wrong, or it is no user's")
            return found
        except (nkeys.NkeysError, ValueError) as error:
            raise ValueError(
                f"{where} holds no nkey seed ({error or type(error).__name__}); expected one line "
                "that begins with SU"
            ) from None

    @property
    def nkey_seed(self) -> str:
        return bytes(nkeys.encode_seed(self.secret, nkeys.PREFIX_BYTE_USER)).decode()

    @property
    def nkey(self) -> str:
        return nkey_of(self.public)

    def sign(self, message: bytes) -> bytes:
        signature = _signing_key(self.secret).sign(message).signature
        _known.add(self.public, signature, message)
        return signature


@lru_cache(64)
def _signing_key(secret: bytes) -> SigningKey:
    return SigningKey(secret)


class _Known:
    """The newest signatures that hold: made here, or found to hold once.

    A peer reads its own records back, and all peers of one process read the same ones.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def add(self, *proof: bytes) -> None:
        with self._lock:
            self._hashes[_hash(proof)] = None
            if len(self._hashes) > MOST_KNOWN:
                self._hashes.popitem(last=False)

    def has(self, *proof: bytes) -> bool:
        return _hash(proof) in self._hashes


def _hash(proof: tuple[bytes, ...]) -> bytes:
    public, signature, message = proof
    lengths = f"{len(public)} {len(signature)} ".encode()
    return hashlib.sha256(lengths + public + signature + message).digest()


_known = _Known()


def verifies(public: bytes, signature: bytes, message: bytes) -> bool:
    if _known.has(public, signature, message):
        return True
    try:
        VerifyKey(public).verify(message, signature)
    except (BadSignatureError, ValueError):
        return False
    _known.add(public, signature, message)
    return True


def nkey_of(public: bytes) -> str:
    """The text form of a public key."""
    plain = bytes([nkeys.PREFIX_BYTE_USER]) + public
    return base64.b32encode(plain + nkeys.crc16(bytearray(plain)).to_bytes(2, "little")).decode()
