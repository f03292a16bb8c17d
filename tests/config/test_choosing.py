"""What `objective = "auto"` stands for."""

from __future__ import annotations

import msgspec
import pytest

from motley.config import CrewConfig, config_text, parse_config

CREW = """
[crew]
name = "c"
task = "digits"
rounds = 2
group_size = 4
problems_per_round = 4
{more}
"""
PEER = '[[peer]]\nname = "{name}"\nmodel = "tiny:0.3m"\n{more}\n'


def crew(*peers: str, more: str = "") -> CrewConfig:
    return parse_config(CREW.format(more=more) + "".join(peers))


A, B = PEER.format(name="a", more=""), PEER.format(name="b", more="")
LEARNER = PEER.format(name="a", more='role = "learner"')
SAMPLER = '[[peer]]\nname = "b"\nrole = "sampler"\nfollows = "a"\n'


def test_who_says_nothing_gets_what_the_evidence_supports() -> None:
    assert crew(A, B).crew.row == "uplift/sure"
    assert crew(A).crew.row == "alone"
    assert crew(A, more='pace = "async"').crew.row == "gepo"
    assert crew(LEARNER, SAMPLER, more='pace = "async"').crew.row == "gepo"
    assert crew(A, B, more='objective = "auto"') == crew(A, B)


def test_it_is_said_which_row_was_taken_and_why() -> None:
    chosen = crew(A, B).crew.chosen
    assert chosen.startswith("auto took uplift/sure: peers that differ")
    assert crew(A, B, more='objective = "ftis"').crew.chosen == ""


def test_a_run_keeps_the_row_that_was_taken() -> None:
    text = config_text(crew(A, B))
    assert 'objective = "uplift"' in text
    assert parse_config(text) == crew(A, B)


def test_who_names_a_row_later_is_not_told_of_another() -> None:
    config = crew(A, B)
    named = msgspec.structs.replace(config.crew, objective="ftis", variant="")
    assert msgspec.structs.replace(config, crew=named).crew.chosen == ""
    assert config.alone("a").crew.row == "alone"
    assert config.alone("a").crew.chosen == ""


def test_a_variant_of_a_row_that_is_not_named_is_refused() -> None:
    with pytest.raises(ValueError, match="leave the variant out, or name the row"):
        crew(A, B, more='variant = "code"')
