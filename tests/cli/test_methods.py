"""motley objectives."""

from __future__ import annotations

from cli.test_cli import as_json, error, motley
from motley.objectives import OBJECTIVES, VARIANTS


def test_every_row_and_variant_is_listed_with_a_line_a_source_and_its_settings() -> None:
    rows = as_json("objectives")["rows"]
    assert [(row["objective"], row["variant"]) for row in rows] == [
        (name, variant) for name in OBJECTIVES for variant in ("", *VARIANTS.get(name, {}))
    ]
    assert all(row["about"] and row["source"] and "beta = 0" in row["settings"] for row in rows)
    grpo = next(row for row in rows if (row["objective"], row["variant"]) == ("grpo", "published"))
    assert grpo["about"] == "without a bound on strangers' ratios"
    assert "dual_clip = inf" in grpo["settings"]


def test_a_table_has_every_row_in_one_line() -> None:
    lines = motley("objectives").stdout.splitlines()
    for name in OBJECTIVES:
        assert any(f" {name} " in line for line in lines), name
    assert not any("settings" in line for line in lines)


def test_one_row_is_listed_with_its_variants_and_settings() -> None:
    found = as_json("objectives", "tis")["rows"]
    assert [row["variant"] for row in found] == [
        "",
        "token_mask",
        "sequence",
        "sequence_mask",
        "trl",
    ]
    assert "C = 2" in motley("objectives", "tis").stdout


def test_a_row_that_does_not_exist_is_told_the_known_ones() -> None:
    assert "objective 'vis' is not known; choose one of alone, nois" in error("objectives", "vis")
