"""The page of a long run, as small as can be: every kind of question is answered and measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from motley.archive import rollouts
from motley.benchmarks.asking import _get, watch_benchmark
from motley.benchmarks.watching import GROUP_SIZE, make_large_run
from motley.clock import RealClock
from motley.learning.traces import traced_rounds
from motley.runs.metrics import learner_lines, read_metrics

pytestmark = pytest.mark.slow


def test_a_large_run_reads_as_a_real_one(tmp_path: Path) -> None:
    make_large_run(tmp_path / "run", rounds=30, peers=3)
    lines = learner_lines(read_metrics(tmp_path / "run"))
    assert len(lines) == 3 * 31
    assert set(lines[-1].senders or {}) == {"peer00", "peer01", "peer02"}
    rows = rollouts(tmp_path / "run")
    assert len(rows) == 30 * 3 * GROUP_SIZE
    assert all(row.prompt and row.completion for row in rows)  # signed, and as assigned
    assert {fate for row in rows for fate in row.fates.values()} >= {"learned", "filtered"}
    assert traced_rounds(tmp_path / "run", "peer01") == list(range(11, 31))


def test_a_large_run_is_the_same_every_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_large_run(tmp_path / name, rounds=5, peers=2, seed=3)
    for path in sorted((tmp_path / "one").rglob("*")):
        if path.is_file():
            assert (
                path.read_bytes()
                == (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes()
            )


def test_every_kind_of_question_is_measured_over_http() -> None:
    pytest.importorskip("uvicorn", reason="needs motley[watch]")
    said: list[str] = []
    rows = watch_benchmark(lambda what, done, total: said.append(what), rounds=30, peers=3)
    named = {row["what"]: row for row in rows}
    assert len(rows) == len(named) == 15
    assert {"crew", "curves by sender", "a formula", "trust", "memory"} <= named.keys()
    assert all(isinstance(row["value"], float) for row in rows if row["what"] != "memory")
    assert named["crew"]["target"] == "< 300"
    assert {"writing metrics", "writing groups", "asking for a formula"} <= set(said)


@contextmanager
def server(*statuses: int) -> Iterator[str]:
    """Answers with these, one after another."""
    left = [*statuses]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = left.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"here" if status == 200 else b"why")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}/"
        finally:
            running.shutdown()
            thread.join()


def test_what_is_not_read_yet_is_asked_for_again() -> None:
    with server(503, 503, 200) as address:
        assert _get(address, "groups/7", clock=RealClock()) == b"here"
    with (
        server(503, 404) as address,
        pytest.raises(ValueError, match="does not answer groups/7: why"),
    ):
        _get(address, "groups/7", clock=RealClock())
