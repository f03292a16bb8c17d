"""Checkpoints of released versions still load, and are written as they were."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from motley.distributed.recovery import LearnerState
from motley.learning.checkpoint import load_manifest, save_checkpoint
from motley.peers.arrivals import Arrival
from motley.peers.state import PeerState, check_dtype
from motley.runs.local import CrewState
from motley.sim.simulation import SimState
from motley.trust import GroupPlace, ReasonCount

RELEASED = Path(__file__).parent / "checkpoints" / "crew-0.5.json"


def write_note(folder: Path) -> None:
    (folder / "full0").mkdir(parents=True)
    (folder / "full0" / "note").write_text("weights")


@pytest.fixture
def released(tmp_path: Path) -> CrewState:
    """The state of a checkpoint that version 0.5 wrote."""
    folder = tmp_path / "released"
    write_note(folder)
    (folder / "state.json").write_bytes(RELEASED.read_bytes())
    return load_manifest(folder, CrewState)


def test_a_crews_checkpoint_of_version_0_5_is_read_with_all_that_it_holds(
    released: CrewState,
) -> None:
    peer = released.peers["full0"]
    assert (released.round, released.log_records, released.metrics_bytes) == (2, 16, 1234)
    assert peer.waiting == [Arrival(15, 2, 1000.0), Arrival(16, 2, 1000.0)]
    assert peer.seen == [GroupPlace("full1", 3, 0), GroupPlace("full1", 4, 1)]
    assert peer.complete == {"full0": 2, "full1": 3}
    assert peer.dropped == [ReasonCount("full1", "stale", 2)]
    assert (peer.head[0], peer.cursor, peer.version, peer.learned_rounds) == (4, 16, 2, 2)
    admission = peer.admission
    assert admission.refused == [
        ReasonCount("full1", "corrupt", 1),
        ReasonCount("unknown", "schema", 1),
    ]
    assert [refused.id for refused in admission.kept] == ["noise", "full1.noise"]
    chain = admission.chains[admission.keys["full1"]]
    assert (chain.next, [counter for counter, _ in chain.missing]) == (10, [7, 8])


NEW = {  # since 0.5
    *("scrutiny", "copies", "in_a_row", "signed_in_a_row", "signed", "undecided"),
    *("skills", "meetings", "prefixes", "memory", "unheard", "early", "missed", "forks"),
}


def as_before(value: object) -> object:
    """What a version 0.5 would have written of a state."""
    if isinstance(value, dict):
        return {key: as_before(each) for key, each in value.items() if key not in NEW}
    return [as_before(each) for each in value] if isinstance(value, list) else value


def test_a_crews_state_has_all_that_version_0_5_wrote(released: CrewState, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 2, released, write_note)
    written = msgspec.json.decode((folder / "state.json").read_bytes())
    assert as_before(written["state"]) == msgspec.json.decode(RELEASED.read_bytes())["state"]


def test_a_members_and_a_simulations_state_have_the_fields_of_version_0_5(
    released: CrewState,
) -> None:
    member = LearnerState(metrics_bytes=7, over=False, peer=released.peers["full0"])
    fields = as_before(msgspec.json.decode(msgspec.json.encode(member)))
    peer = msgspec.json.decode(RELEASED.read_bytes())["state"]["peers"]["full0"]
    assert fields == {"metrics_bytes": 7, "over": False, "peer": peer}
    assert msgspec.json.encode(SimState(round=3, time_s=1.5)) == b'{"round":3,"time_s":1.5}'


def test_another_arithmetic_than_the_checkpoints_is_refused_with_the_remedy(
    released: CrewState,
) -> None:
    state: PeerState = released.peers["full0"]
    check_dtype(state, "full0", "torch.float32")
    with pytest.raises(
        ValueError, match=r"computed in torch\.float32 .* set dtype = 'float32' for it"
    ):
        check_dtype(state, "full0", "torch.bfloat16")
