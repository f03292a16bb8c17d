from __future__ import annotations

import os
import stat
from pathlib import Path

import nkeys
import pytest
from nacl import signing

import motley.trust.identity as module
from fakes import identity
from motley.trust import Identity, nkey_of, verifies

ONE = identity("one")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "key"


def test_a_key_is_made_once_and_read_from_then_on(path: Path) -> None:
    made = Identity.kept_at(path)
    content = path.read_bytes()
    assert Identity.kept_at(path) == made
    assert path.read_bytes() == content
    assert Identity.kept_at(path.with_name("other")) != made


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_only_the_owner_may_read_a_key(path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        Identity.kept_at(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_file_is_one_line_that_nats_tools_understand(path: Path) -> None:
    made = Identity.kept_at(path)
    (line,) = path.read_text().splitlines()
    assert line.startswith("SU")
    assert nkeys.from_seed(line.encode()).public_key.decode() == made.nkey
    path.write_text(f"  {line}\r\n\n")
    assert Identity.kept_at(path) == made


def test_a_secret_is_not_shown() -> None:
    assert ONE.secret.hex() not in repr(ONE)
    assert repr(ONE.secret) not in repr(ONE)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\n",
        "SU",
        "hello",
        "not a key at all",
        ONE.nkey,
        ONE.nkey_seed[:-5],
        ONE.nkey_seed[:30],
        ONE.nkey_seed + "A" * 8,
        ONE.nkey_seed + "\nmore",
        "größe",
    ],
)
def test_a_file_that_holds_no_seed_is_an_error_with_a_remedy(path: Path, content: str) -> None:
    path.write_text(content)
    with pytest.raises(
        ValueError, match=f"{path} holds no nkey seed .*; expected one line that begins with SU"
    ):
        Identity.kept_at(path)
    assert path.read_text() == content


@pytest.mark.parametrize("place", [2, 5, 20, 40, 57])
def test_a_seed_with_one_wrong_letter_is_not_another_identity(place: int) -> None:
    seed = ONE.nkey_seed
    with pytest.raises(ValueError, match="holds no nkey seed"):
        Identity.from_nkey_seed(
            seed[:place] + ("B" if seed[place] != "B" else "C") + seed[place + 1 :], "the key"
        )


def test_the_seed_of_an_account_is_not_an_identity() -> None:
    seed = nkeys.encode_seed(ONE.secret, nkeys.PREFIX_BYTE_ACCOUNT).decode()
    assert seed.startswith("SA")
    with pytest.raises(ValueError, match="begins with SU"):
        Identity.from_nkey_seed(seed, "the key")


def test_a_file_that_holds_no_text_is_an_error_with_a_remedy(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="holds no nkey seed"):
        Identity.kept_at(path)


@pytest.mark.parametrize("name", ["one", "two", "three"])
def test_text_forms_are_what_nkeys_says(name: str) -> None:
    one = identity(name)
    pair = nkeys.from_seed(one.nkey_seed.encode())
    assert one.nkey == nkey_of(one.public) == pair.public_key.decode()
    assert one.nkey.startswith("U")
    assert len(one.nkey) == 56
    assert pair.sign(b"message") == one.sign(b"message")
    assert Identity.from_nkey_seed(one.nkey_seed, "the seed") == one


def test_a_signature_verifies_under_its_key_for_its_message_alone() -> None:
    message = b"a message"
    signature = ONE.sign(message)
    assert len(signature) == 64
    assert verifies(ONE.public, signature, message)
    assert not verifies(identity("two").public, signature, message)
    for changed in (b"", message + b"\x00", message[:-1]):
        assert not verifies(ONE.public, signature, changed)


def test_with_any_bit_of_signature_message_or_key_changed_nothing_verifies() -> None:
    parts = [ONE.public, ONE.sign(b"a message"), b"a message"]
    for number, part in enumerate(parts):
        for bit in range(8 * len(part)):
            changed = bytearray(part)
            changed[bit // 8] ^= 1 << bit % 8
            public, signature, message = [
                bytes(changed) if place == number else other for place, other in enumerate(parts)
            ]
            assert not verifies(public, signature, message)


def test_keys_and_signatures_of_a_wrong_length_do_not_verify() -> None:
    good = ONE.sign(b"a message")
    for public, signature in (
        (b"", good),
        (ONE.public[:31], good),
        (ONE.public + b"\x00", good),
        (ONE.public, b""),
        (ONE.public, good + b"\x00"),
    ):
        assert not verifies(public, signature, b"a message")
    assert not verifies(bytes(32), bytes(64), b"a message")


# Signatures that are not verified again


def test_a_signature_that_held_holds_for_nothing_else() -> None:
    two = identity("two")
    signature = ONE.sign(b"a message")
    assert verifies(ONE.public, signature, b"a message")
    assert not verifies(ONE.public, signature, b"another")
    assert not verifies(two.public, signature, b"a message")
    assert not verifies(ONE.public, two.sign(b"a message"), b"a message")
    # the same bytes in a row, cut elsewhere
    assert not verifies(ONE.public, signature + b"a", b" message")
    assert not verifies(ONE.public, signature[:-1], signature[-1:] + b"a message")


def test_what_was_found_to_hold_or_made_here_is_verified_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    class Counting(module.VerifyKey):  # type: ignore[misc]
        def verify(self, *what: object) -> object:
            asked.append(what)
            return super().verify(*what)

    monkeypatch.setattr(module, "VerifyKey", Counting)
    mine, another = ONE.sign(b"mine"), signing.SigningKey(ONE.secret).sign(b"another's").signature
    assert verifies(ONE.public, mine, b"mine")
    assert not asked
    assert verifies(ONE.public, another, b"another's")
    assert verifies(ONE.public, another, b"another's")
    assert len(asked) == 1
    for _ in range(2):
        assert not verifies(ONE.public, mine, b"not mine")
    assert len(asked) == 3, "what does not hold is not remembered"


def test_only_the_newest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    known = module._Known()
    monkeypatch.setattr(module, "_known", known)
    monkeypatch.setattr(module, "MOST_KNOWN", 3)
    signatures = [ONE.sign(bytes([number])) for number in range(5)]
    held = [known.has(ONE.public, s, bytes([number])) for number, s in enumerate(signatures)]
    assert held == [False, False, True, True, True]
    assert all(verifies(ONE.public, s, bytes([number])) for number, s in enumerate(signatures))
