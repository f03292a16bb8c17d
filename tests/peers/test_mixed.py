"""What a peer does in a crew of several vocabularies: its table, its flags, the texts it scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from fakes import PROBLEM, spread_crew, write_task
from motley.config import CrewConfig
from motley.engines.engine import Completion
from motley.exchange import MemoryLog, decode, unpack
from motley.models.prompts import Prompts
from motley.models.tiny import tiny_vocabulary
from motley.models.vocabulary import Vocabulary
from motley.peers.peer import Peer
from motley.peers.sampling import _canonical
from motley.records import Content, Group, Table
from motley.spelling import Spelling
from motley.trust import RefusedRecord, stamp_of
from peers.test_peer import peers_of, share
from vocabularies import piece_tokenizer


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CrewConfig:
    monkeypatch.syspath_prepend(tmp_path)
    write_task(tmp_path)
    return spread_crew(tmp_path)


def mixed_peers(config: CrewConfig, log: MemoryLog, outboxes: Path | None = None) -> list[Peer]:
    """Peers that must think that others may have another vocabulary."""
    peers = peers_of(config, log, outboxes, mixed=True)
    assert all(peer.admission.rules.mixed for peer in peers)
    return peers


def contents(log: MemoryLog) -> list[Content]:
    return [decode(unpack(entry.record).body)[1] for entry in log.read(0)]


def kinds(log: MemoryLog, sender: str) -> list[str]:
    of_sender = [entry for entry in log.read(0) if entry.id.startswith(f"{sender}.")]
    return [type(decode(unpack(e.record).body)[1]).__name__ for e in of_sender]


def test_a_table_goes_out_once_before_the_first_group(config: CrewConfig) -> None:
    log = MemoryLog()
    peers = mixed_peers(config, log)
    share(*peers)
    share(*peers)
    assert kinds(log, "full0") == ["Table", "Group", "Group", "Group", "Group"]
    (table, other) = [content for content in contents(log) if isinstance(content, Table)]
    vocabulary = tiny_vocabulary()
    assert (table.vocabulary, table.ends) == (vocabulary.fingerprint, vocabulary.end_ids)
    assert Spelling.decode(table.encoded) == vocabulary.spelling
    assert (table.peer, other.peer) == ("full0", "full1")
    for peer in peers:
        peer.receive_all()
        assert not peer.admission.refused
        assert len(peer.waiting) == 8
        assert peer.admission.state().tables == [3, 6]


def test_with_one_vocabulary_nothing_of_it_is_on_the_log(config: CrewConfig) -> None:
    plain, mixed = MemoryLog(), MemoryLog()
    share(*peers_of(config, plain))
    share(*mixed_peers(config, mixed))
    assert not any(isinstance(content, Table) for content in contents(plain))
    before, after = (
        [rollout for c in contents(log) if isinstance(c, Group) for rollout in c.rollouts]
        for log in (plain, mixed)
    )
    assert all(rollout.canonical for rollout in before)
    # of these tokenizers no cut is another but of special tokens; bytes and text are the same
    spelled = tiny_vocabulary().spelling.token_bytes
    for rollout, other in zip(before, after, strict=True):
        texts = [spelled[i] for i in rollout.tokens[: -1 if rollout.ending == "stop" else None]]
        assert msgspec.structs.replace(rollout, canonical=None not in texts) == other
    assert {rollout.canonical for rollout in after} == {True, False}


def test_a_table_is_not_put_again_after_a_crash(config: CrewConfig, tmp_path: Path) -> None:
    log = MemoryLog()
    share(*mixed_peers(config, log, tmp_path))
    peers = mixed_peers(config, log, tmp_path)  # with the outboxes as they were left
    for peer in peers:
        peer.half.sampled_rounds = 1
    share(*peers)
    assert kinds(log, "full0") == ["Table", "Group", "Group", "Group", "Group"]
    assert [stamp_of(e)[0].counter for e in log.read(0, sender="full0")] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_a_table_is_known_again_from_a_checkpoint_without_an_outbox(config: CrewConfig) -> None:
    log = MemoryLog()
    peers = mixed_peers(config, log)
    share(*peers)
    for peer in peers:
        peer.receive_all()
        peer.learn()
    states = [
        msgspec.json.decode(msgspec.json.encode(p.state()), type=type(p.state())) for p in peers
    ]
    again = mixed_peers(config, log)
    for peer, state in zip(again, states, strict=True):
        peer.load_state(state)
        assert peer.half.tables.positions == [3, 6]
    share(*again)
    assert kinds(log, "full0") == ["Table", "Group", "Group", "Group", "Group"]
    for peer in again:
        peer.receive_all()
        assert not peer.admission.missing
        assert not peer.admission.refused


def test_a_peer_of_another_log_is_told_so(config: CrewConfig) -> None:
    log = MemoryLog()
    peers = mixed_peers(config, log)
    share(*peers)
    peers[0].receive_all()
    state = peers[0].state()
    there = msgspec.structs.replace(state.admission, tables=[4])
    (again, _) = mixed_peers(config, log)
    with pytest.raises(ValueError, match=r"no table at position 4.*another log"):
        again.load_state(msgspec.structs.replace(state, admission=there))


def test_a_group_of_a_vocabulary_without_a_table_is_refused_and_told_what_was_expected(
    config: CrewConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MemoryLog()
    first, second = mixed_peers(config, log)
    monkeypatch.setattr(second.half.policy.vocabulary, "fingerprint", "other")
    second.half.mixed = False  # it thinks that all have its own
    share(second)
    first.receive_all()
    refused = first.admission.kept[-1]
    assert isinstance(refused, RefusedRecord)
    assert (refused.reason, "expected the table first" in refused.detail) == ("vocabulary", True)


class FakePolicy:
    """What flags are made by."""

    def __init__(self, vocabulary: Vocabulary, chat: bool = False) -> None:
        self.vocabulary, self.prompts = vocabulary, Prompts(vocabulary, chat=chat)


def flags(vocabulary: Vocabulary, *answers: Sequence[int]) -> list[bool]:
    ends = vocabulary.end_ids
    made = [
        Completion(tuple(a), (-1.0,) * len(a), "stop" if a and a[-1] in ends else "length")
        for a in answers
    ]
    return _canonical(FakePolicy(vocabulary), PROBLEM, made)  # type: ignore[arg-type]


def test_a_completion_is_canonical_if_its_tokenizer_would_write_it_so() -> None:
    vocabulary = Vocabulary(piece_tokenizer())
    end = vocabulary.end_id
    joined = vocabulary.cut(b" Hello world")
    assert isinstance(joined, tuple)
    apart = [i for letter in " Hello world" for i in vocabulary.encode(letter)]
    special = vocabulary.tokenizer.convert_tokens_to_ids("<s>")
    torn = vocabulary.encode("é")[:1]
    assert flags(
        vocabulary,
        [*joined, end],
        joined,
        [*apart, end],
        [*joined, special, end],
        [*joined, *torn],
        [end],
    ) == [True, True, False, False, False, True]


def test_another_end_than_the_taught_one_is_not_canonical() -> None:
    """Such as a newline that a stop names: others have no token for that event."""
    tokenizer = piece_tokenizer()
    comma = tokenizer.convert_tokens_to_ids(",")
    vocabulary = Vocabulary(tokenizer, ends=[comma])
    cut = vocabulary.cut(b" Hello")
    assert isinstance(cut, tuple)
    assert flags(vocabulary, [*cut, vocabulary.end_id], [*cut, comma]) == [True, False]


def test_what_is_scored_is_what_others_can_read() -> None:
    """SentencePiece decoders leave out a leading space, and the table has it."""
    vocabulary = Vocabulary(piece_tokenizer("prepend"))
    hello, special = vocabulary.encode("Hello"), vocabulary.tokenizer.convert_tokens_to_ids("<s>")
    assert vocabulary.decode_all([[*hello, vocabulary.end_id]]) == ["Hello"]
    assert vocabulary.read_all([[*hello, vocabulary.end_id], hello]) == [" Hello", " Hello"]
    # nobody else can read it, and nothing of it is hidden from a reward function
    assert vocabulary.read_all([[*hello, special]]) == vocabulary.decode_all([[*hello, special]])
    torn = vocabulary.encode("é")[-2:-1]
    assert vocabulary.read_all([torn]) == ["\ufffd"]


def test_branches_are_not_asked_for_their_cut(config: CrewConfig) -> None:
    """Only their author learns from them."""
    (half, _) = (peer.half for peer in mixed_peers(config, MemoryLog()))
    asked = half.ask()
    branch = Group.__struct_fields__  # any object that is not None
    asked = asked._replace(branches=[branch] * len(asked.problems))  # type: ignore[list-item]
    unknown = Completion((2,), (-1.0,), "length")
    assert half._canonical(asked, 0, [unknown]) == [True]
    assert half._canonical(half.ask(), 0, [unknown]) == [False]


def test_of_a_crew_with_one_vocabulary_nothing_is_asked_of_its_table(
    config: CrewConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (half, _) = (peer.half for peer in peers_of(config, MemoryLog()))
    monkeypatch.setitem(half.policy.vocabulary.__dict__, "_speller", None)  # would fail
    assert half._canonical(half.ask(), 0, [Completion((2,), (-1.0,), "length")]) == [True]
    assert half.texts([(11, 12, 1)]) == tiny_vocabulary().decode_all([(11, 12, 1)])
