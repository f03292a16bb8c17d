"""The page of real runs: every answer is what the schema says, and a hub comes and goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from dashboard.asking import BASE, eventually, fits
from fakes import spread_crew
from motley.dashboard.guard import Access
from motley.dashboard.server import make_app
from motley.dashboard.shown import Showcase
from motley.dashboard.targets import find_targets
from motley.runs.local import LocalCrew

pytestmark = pytest.mark.slow


@contextmanager
def page_of(*folders: Path) -> Iterator[TestClient]:
    showcase = Showcase(find_targets([str(folder) for folder in folders]))
    try:
        yield TestClient(make_app(showcase, Access()), base_url=BASE)
    finally:
        showcase.close()


@pytest.fixture(scope="module")
def run(task: Path) -> Path:
    """Two peers, three rounds."""
    folder = task / "tiny"
    for _ in LocalCrew.start(spread_crew(task, rounds=3), folder).rounds():
        pass
    return folder


def test_every_answer_about_a_run_is_what_the_schema_says(run: Path) -> None:
    with page_of(run) as client:
        ask: Callable[[str], Any] = lambda path: client.get(f"/api/runs/tiny/{path}")
        eventually(lambda: ask("crew").json()["indexed"] == 1.0 and ask("groups").json()["groups"])
        schema = client.get("/api/schema").json()
        addresses, parts = schema["addresses"], schema["components"]
        group = ask("groups").json()["groups"][0]
        learner = next(iter(group["rollouts"][0]["fates"]))
        for path, query in {
            "crew": "?rounds=1..2",
            "curves": "?key=reward&key=heldout&key=senders.kl_k3&points=10",
            "groups": f"?learner={learner}&limit=3",
            "groups/{position}": "",
            "groups/{position}/{number}/{learner}/{token}": "",
            "discarded": f"?learner={learner}",
            "histograms": f"?learner={learner}&sender=full1",
            "trust": "",
            "speed": "",
        }.items():
            values = {"position": group["position"], "number": 0, "learner": learner, "token": 0}
            answer = ask(path.format(**values) + query)
            assert answer.status_code == 200, (path, answer.text)
            assert fits(answer.json(), addresses[f"/api/runs/{{id}}/{path}"]["answer"], parts), path
        assert ask("crew").json()["round"] == 3
        assert len(ask("curves?key=reward").json()["curves"]) == 2
        assert ask("groups/999999").status_code == 404


def test_nothing_is_written_into_a_run_that_is_watched(run: Path) -> None:
    state = lambda: {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    before = state()
    with page_of(run) as client:
        eventually(lambda: client.get("/api/runs/tiny/crew").json()["indexed"] == 1.0)
        client.get("/api/runs/tiny/groups")
    assert state() == before


def test_a_run_that_is_not_there_yet_is_shown_when_it_comes(task: Path) -> None:
    folder = task / "later"
    showcase = Showcase(find_targets([str(folder)], may_come=True))
    client = TestClient(make_app(showcase, Access()), base_url=BASE)
    try:
        crew = client.get("/api/runs/later/crew").json()
        assert crew["round"] == 0
        assert "there is no log yet: rollouts are shown when there is" in crew["notes"]
        early = client.get("/api/runs/later/groups/3")
        assert (early.status_code, early.json()["error"]) == (
            503,
            "later has no log yet; ask again when it has",
        )
        for _ in LocalCrew.start(spread_crew(task, rounds=1), folder).rounds():
            pass
        eventually(lambda: client.get("/api/runs/later/groups").json()["groups"] != [])
        eventually(lambda: client.get("/api/runs/later/crew").json()["round"] == 1)
    finally:
        showcase.close()
