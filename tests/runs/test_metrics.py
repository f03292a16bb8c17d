"""Lines of metrics.jsonl: their bytes, reading them, and that docs/metrics.md names every key."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from motley.learning.senders import Distribution, SenderMetrics, Spread
from motley.runs.metrics import (
    FirstLine,
    LearnerLine,
    MetricsLine,
    SamplerLine,
    Timing,
    append_lines,
    decode_lines,
    learner_lines,
    read_metrics,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
SILENT = SenderMetrics(
    groups=1, reward=0.0, accuracy=0.0, tokens=3.0, truncated=1.0, age=0.0, silent_groups=1
)


def written(line: MetricsLine | FirstLine, folder: Path) -> str:
    append_lines(folder / "metrics.jsonl", [line])
    return (folder / "metrics.jsonl").read_text().splitlines()[-1]


def test_a_line_has_the_keys_that_have_a_value_in_their_order(tmp_path: Path) -> None:
    line = LearnerLine(
        round=2,
        peer="small",
        version=2,
        reward=0.5,
        loss=-0.25,
        grad_norm=1.5,
        num_sequences=8,
        num_scored=0,
        num_tokens=24,
        ages={0: 3, 2: 1},
        senders={"deep": SILENT},
        waiting=0,
        refused={},
        dropped={"deep": {"stale": 1}},
        heldout={"sort": 1.0},
        timing=Timing(0.5, 0.0, 12.0, 0.0),
        without=["deep"],
    )
    assert written(line, tmp_path) == (
        '{"round":2,"peer":"small","version":2,"reward":0.5,"loss":-0.25,"grad_norm":1.5,'
        '"num_sequences":8,"num_scored":0,"num_tokens":24,"ages":{"0":3,"2":1},"senders":{"deep":'
        '{"groups":1,"reward":0.0,"accuracy":0.0,"tokens":3.0,"truncated":1.0,"age":0.0,'
        '"silent_groups":1}},"waiting":0,"refused":{},"dropped":{"deep":{"stale":1}},'
        '"heldout":{"sort":1.0},"timing":{"sample_s":0.5,"learn_s":0.0,'
        '"sampled_tokens_per_s":12.0,"learned_tokens_per_s":0.0},"without":["deep"]}'
    )


def test_a_simulated_peer_begins_with_the_time_before_its_accuracies(tmp_path: Path) -> None:
    first = FirstLine(round=0, peer="l", time_s=0.0, heldout={"sort": 0.5}, ood={"sort": 0.0})
    assert written(first, tmp_path) == (
        '{"round":0,"peer":"l","time_s":0.0,"heldout":{"sort":0.5},"ood":{"sort":0.0}}'
    )
    (read,) = read_metrics(tmp_path)
    assert read == LearnerLine(
        round=0, peer="l", time_s=0.0, heldout={"sort": 0.5}, ood={"sort": 0}
    )


def test_a_samplers_line_has_its_own_keys(tmp_path: Path) -> None:
    line = SamplerLine(
        round=1,
        peer="s",
        version=0,
        reward=0.5,
        sampled_tokens=96,
        behind=0,
        timing=Timing(2.0, sampled_tokens_per_s=48.0),
    )
    assert written(line, tmp_path) == (
        '{"round":1,"peer":"s","version":0,"reward":0.5,"sampled_tokens":96,"behind":0,'
        '"timing":{"sample_s":2.0,"sampled_tokens_per_s":48.0}}'
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    spread = Distribution(1.0, 2.0, 0.5, 0.9, 1.9)
    scored = msgspec.structs.replace(
        SILENT, kl_k3=0.25, ratio=spread, free_weight=Spread(1.0, 2.0, 0.5, 0.9, 1.9, 0.2),
        tau_after=None,
    )  # fmt: skip
    learner = LearnerLine(round=1, peer="l", senders={"l": scored, "s": SILENT}, ages={1: 2})
    sampler = SamplerLine(round=1, peer="s", version=3, reward=0.5, sampled_tokens=0)
    append_lines(tmp_path / "metrics.jsonl", [learner, sampler])
    lines = read_metrics(tmp_path)
    assert lines == [learner, sampler]
    assert learner_lines(lines) == [learner]


def test_a_mean_over_nothing_is_null_and_what_was_not_scored_is_no_key() -> None:
    scored = msgspec.structs.replace(SILENT, kl_k3=0.25, tau_after=None)
    keys = msgspec.json.decode(msgspec.json.encode(scored))
    assert keys["tau_after"] is None
    assert "tau_before" not in keys
    assert [scored.number(key) for key in ("kl_k3", "tau_after", "ess", "tokens")] == [
        0.25, None, None, 3.0,
    ]  # fmt: skip


def test_a_distribution_counts_with_its_mean() -> None:
    weighted = msgspec.structs.replace(SILENT, weight=Distribution(0.75, 2.0, 0.5, 0.9, 1.9))
    assert weighted.number("weight") == 0.75


def test_lines_with_keys_of_another_time_are_read() -> None:
    content = (
        b'{"round":3,"peer":"a","version":3,"surprise":{"x":[1]},"loss":null,'
        b'"senders":{"a":{"groups":1,"reward":1,"accuracy":1,"tokens":4,"truncated":0,"age":0,'
        b'"silent_groups":0,"kl_k1":null,"ratio":{"mean":null,"max":null,"q05":1,"q50":1,"q95":1,'
        b'"q99":1}}},"ages":{"2":1}}\n'
    )
    (line,) = learner_lines(decode_lines(content))
    assert (line.round, line.loss, line.ages) == (3, None, {2: 1})
    assert line.senders is not None
    assert line.senders["a"].number("kl_k1") is None
    assert line.senders["a"].number("ratio") is None


def test_a_line_that_is_cut_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"line 1 of m\.jsonl is no line of metrics .*; delete"):
        decode_lines(b'{"round":3,"pe', "m.jsonl")


def test_a_line_that_is_just_being_written_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"round":1,"peer":"a"}\n{"round":3,"pe')
    assert [line.round for line in read_metrics(tmp_path)] == [1]
    with pytest.raises(ValueError, match=r"none/metrics\.jsonl cannot be read .*; give the folder"):
        read_metrics(tmp_path / "none")


# The document


def documented(heading: str) -> set[str]:
    """The keys in the tables under a heading, up to the next of its kind."""
    text = DOCUMENT.read_text()
    section = text[text.index(f"\n{heading}\n") :][1:]
    section = section[: section.find("\n## ", 1)]
    section = section[: section.find("\n### ")] if "\n### " in section else section
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


def test_every_key_is_documented_and_no_other() -> None:
    of_peer = documented("## The peer's round") | documented("## The step")
    assert set(LearnerLine.__struct_fields__) == of_peer | documented(
        "## Accuracies and rewards"
    ) | {"timing"}
    assert set(SamplerLine.__struct_fields__) == documented("## A sampler's line")
    assert set(Timing.__struct_fields__) == documented("## `timing`")
    assert set(SenderMetrics.__struct_fields__) == documented("## `senders`: what came from whom")
