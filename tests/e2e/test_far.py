"""A crew over a link with a round trip of 0.3 s that loses one packet in a hundred; `python
tests/far.py` has it worse, and at length.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from chaos import faults_of, undisturbed_run
from fakes import spread_crew, write_task
from far import Quality, far_link, far_run, refusal

pytestmark = pytest.mark.slow  # a process per peer

LINK = Quality(delay_s=0.15, loss=0.01, seed=0)


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    if reason := refusal():
        pytest.skip(reason)


def namespaces() -> set[str]:
    return {
        line.split()[0]
        for line in subprocess.run(
            ["ip", "netns", "list"], capture_output=True, text=True
        ).stdout.splitlines()
    }


def test_a_crew_far_apart_ends_as_one_in_a_single_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = spread_crew(tmp_path, ("full", "last"), rounds=3)
    before = namespaces()
    report = far_run(config, tmp_path / "run", LINK, timeout_s=600)
    print(report)
    assert faults_of(config, tmp_path / "run", undisturbed_run(config, tmp_path / "local")) == []
    assert report.round_trip_s >= 2 * LINK.delay_s  # twice the way
    assert report.dropped >= 1
    assert namespaces() == before


def fail_in(link: Quality) -> None:
    with far_link(link) as found:
        assert {found.near, found.far} <= namespaces()
        raise ZeroDivisionError


def test_a_run_that_fails_leaves_no_namespaces() -> None:
    before = namespaces()
    with pytest.raises(ZeroDivisionError):
        fail_in(LINK)
    assert namespaces() == before
