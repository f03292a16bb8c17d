"""The server of the page: what it answers, whom it refuses, and that it only reads."""

from __future__ import annotations

import http.client
import json
import math
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import uvicorn
from starlette.testclient import TestClient

from dashboard.asking import BASE, eventually, fits
from hubs import PATIENCE_S
from motley.archive import Archive
from motley.clock import Clock, RealClock
from motley.dashboard import shown
from motley.dashboard.addresses import ADDRESSES
from motley.dashboard.answers import (
    Crew,
    Curves,
    Discarded,
    Formula,
    GroupPage,
    GroupText,
    Histograms,
    RolloutText,
    Speed,
    TrustView,
)
from motley.dashboard.guard import LOOPBACK, Access
from motley.dashboard.log_view import GroupQuery
from motley.dashboard.records import NewestGroup
from motley.dashboard.server import make_app, make_schema
from motley.dashboard.shown import Showcase, ShownRun
from motley.dashboard.targets import find_targets

EVIL = "<script>alert(1)</script>"


class FakeMetrics:
    """Counts the lines of RUN/metrics.jsonl as rounds."""

    def __init__(self, folder: Path, clock: Clock = RealClock()) -> None:
        self._path = folder / "metrics.jsonl"
        self.round, self.is_over, self.indexed = 0, False, 1.0

    def refresh(self, seconds: float = 0.2) -> bool:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        is_new, self.round = len(lines) != self.round, len(lines)
        return is_new

    def crew(self, rounds: tuple[float, float], newest: Mapping[str, NewestGroup]) -> Crew:
        return Crew(
            name=f"rounds {rounds[0]} to {rounds[1]}",
            task="digits",
            objective="ftis",
            pace="lockstep",
            rounds=10,
            round=self.round,
            is_over=self.is_over,
            left_s=math.nan,
            seconds=None,
            measure="accuracy",
            kinds=[],
            peers=[],
            arrows=[],
            warnings=[],
            notes=[],
            indexed=self.indexed,
            keys=["reward"],
        )

    def curves(
        self, keys: Sequence[str], points: int, rounds: tuple[float, float], peer: str = ""
    ) -> Curves:
        if "nonsense" in keys:
            raise ValueError("key 'nonsense' is no number of a metrics line; use reward")
        return Curves(curves=[], every=points)

    def trust(self, faults: dict[str, dict[str, int]]) -> TrustView:
        return TrustView(suspects=[], alarm=2.0, faults=faults)


class FakeLog:
    """One group, whose text is a stranger's."""

    indexed = 1.0
    notes = ("no prompts: the task is not here",)

    def __init__(self, archive: Archive, clock: Clock = RealClock()) -> None:
        self.queries: list[GroupQuery] = []

    def load(self, seconds: float) -> None:
        pass

    def refresh(self, seconds: float = 0.2) -> bool:
        return False

    def newest(self) -> dict[str, NewestGroup]:
        return {}

    def faults(self) -> dict[str, dict[str, int]]:
        return {"mallory": {"signature": 3}}

    def groups(self, query: GroupQuery) -> GroupPage:
        self.queries.append(query)
        return GroupPage(groups=[], next=None, looked_at=query.limit, total=1)

    def group(self, position: int, learner: str) -> GroupText:
        if position != 1:
            raise ValueError(f"the log has no group at {position}; it has 1")
        rollout = RolloutText(
            number=0,
            reward=0.5,
            ending="stop",
            canonical=True,
            completion=EVIL,
            tokens=["<script>", "alert(1)", "</script>"],
            logprobs=[-0.5, math.inf, -0.25],
            fates={},
            traces=[],
        )
        return GroupText(
            position=1,
            id="a.0.0",
            round=1,
            slot=0,
            sender="a",
            model=EVIL,
            version=0,
            created_s=None,
            temperature=1.0,
            kind=None,
            prompt=EVIL,
            answer=None,
            fault="",
            fault_words=learner,
            rollouts=[rollout],
            before=None,
            after=None,
        )

    def formula(self, position: int, number: int, learner: str, token: int) -> Formula:
        return Formula(
            objective="ftis", about=f"{position}/{number}/{learner}/{token}", lines=[], verdict=""
        )

    def discarded(self, learner: str, points: int) -> Discarded:
        return Discarded(learner=learner, reasons=[], total=points)

    def histograms(self, learner: str, sender: str, rounds: tuple[float, float]) -> Histograms:
        return Histograms(histograms=[])

    def speed(self) -> Speed:
        return Speed(wires=[], records=1)


class FakeKeeper:
    """A log that is there from the start."""

    def __init__(self, folder: Path, clock: Clock = RealClock()) -> None:
        self.archive, self.note = object(), "the hub is not running"

    def close(self) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder, shown by views that are not real."""
    monkeypatch.setattr(shown, "MetricsView", FakeMetrics)
    monkeypatch.setattr(shown, "LogView", FakeLog)
    monkeypatch.setattr(shown, "LogKeeper", FakeKeeper)
    folder = tmp_path / "demo-001"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "secret.txt").write_text("secret")
    return folder


@pytest.fixture
def static(tmp_path: Path) -> Path:
    folder = tmp_path / "static"
    folder.mkdir()
    (folder / "index.html").write_text("<!doctype html><title>Motley</title>")
    (folder / "main.js").write_text("export const one = 1;")
    return folder


@contextmanager
def showing(*targets: Path) -> Iterator[Showcase]:
    showcase = Showcase(find_targets([str(target) for target in targets]))
    try:
        yield showcase
    finally:
        showcase.close()


@pytest.fixture
def showcase(run: Path) -> Iterator[Showcase]:
    with showing(run) as made:
        yield made


@pytest.fixture
def client(showcase: Showcase, static: Path) -> TestClient:
    return TestClient(make_app(showcase, Access(), static=static), base_url=BASE)


@pytest.fixture
def ready(client: TestClient) -> TestClient:
    """When the log is open."""
    eventually(lambda: client.get("/api/runs/demo-001/groups/1").status_code == 200)
    return client


def test_the_page_lists_what_it_shows(client: TestClient, run: Path) -> None:
    served = {"id": "demo-001", "name": "demo-001", "kind": "run", "place": str(run)}
    assert client.get("/api/runs").json() == [served]


def test_every_address_answers_a_struct(ready: TestClient) -> None:
    values = {"position": "1", "number": "0", "learner": "a", "token": "2"}
    for address in ADDRESSES:
        query = "?key=reward" if address.path == "curves" else ""
        answer = ready.get(f"/api/runs/demo-001/{address.path.format(**values)}{query}")
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.json().keys() >= set(address.answer.__struct_fields__)


def test_a_completion_with_a_script_is_the_text_of_a_json_answer(ready: TestClient) -> None:
    answer = ready.get("/api/runs/demo-001/groups/1")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.json()["rollouts"][0]["completion"] == EVIL
    assert answer.json()["rollouts"][0]["logprobs"] == [-0.5, None, -0.25]


def test_queries_are_read(ready: TestClient, showcase: Showcase) -> None:
    wanted = (
        "after=4&limit=7&newest=1&sender=a&learner=b&rounds=3..9&kind=sum&rewards=..0.5&text=x"
        "&fate=fil"
    )
    assert ready.get(f"/api/runs/demo-001/groups?{wanted}").json()["looked_at"] == 7
    with showcase.using("demo-001") as shown_run:
        log: Any = shown_run._log
        assert log.queries[-1] == GroupQuery(
            after=4,
            limit=7,
            newest=True,
            sender="a",
            learner="b",
            rounds=(3.0, 9.0),
            kind="sum",
            rewards=(-math.inf, 0.5),
            text="x",
            fate="fil",
        )
    assert ready.get("/api/runs/demo-001/crew?rounds=2..5").json()["name"] == "rounds 2.0 to 5.0"
    assert ready.get("/api/runs/demo-001/groups/1/0/b/7").json()["about"] == "1/0/b/7"
    assert ready.get("/api/runs/demo-001/groups/1?learner=b").json()["fault_words"] == "b"


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("crew?rounds=9..3", "rounds '9..3' is no range"),
        ("crew?rounds=3&rounds=4", "rounds is given 2 times; give it once"),
        ("crew?round=3", "'round' is no parameter here; expected rounds"),
        ("trust?x=1", "'x' is no parameter here; expected none"),
        ("curves", "got 0 keys; give from 1 to 50, such as key=reward"),
        ("curves?key=nonsense", "key 'nonsense' is no number of a metrics line"),
        ("curves?key=reward&points=1e3", "points '1e3' is no whole number from 0 to 5000"),
        ("curves?key=reward&points=99999", "points '99999' is no whole number from 0 to 5000"),
        ("groups?limit=-1", "limit '-1' is no whole number from 0 to 500"),
        ("groups?limit=٣", "limit '٣' is no whole number"),
        ("groups?text=" + "x" * 3000, "text has 3000 letters; expected 2000 at most"),
        ("groups/x", "position 'x' is no whole number"),
        ("groups/" + "9" * 5000, "is no whole number"),
        ("groups/1/0/b/-7", "token '-7' is no whole number"),
    ],
)
def test_a_bad_query_is_refused_in_one_line(ready: TestClient, query: str, words: str) -> None:
    answer = ready.get(f"/api/runs/demo-001/{query}")
    assert answer.status_code == 400
    assert words in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


def test_what_is_not_there_is_a_404_that_says_what_is(ready: TestClient) -> None:
    assert "it has demo-001" in ready.get("/api/runs/other/crew").json()["error"]
    for path in ("/api/runs/other/crew", "/api/runs/other/events", "/reports/demo-001", "/api/x"):
        assert ready.get(path).status_code == 404, path
    answer = ready.get("/api/runs/demo-001/groups/9")
    assert (answer.status_code, answer.json()["error"]) == (
        404,
        "the log has no group at 9; it has 1",
    )


WAYS_OUT = (
    "..",
    "../secret.txt",
    "../../secret.txt",
    "secret.txt",
    "/etc/passwd",
    "demo-001/secret.txt",
)


@pytest.mark.parametrize("way", WAYS_OUT)
@pytest.mark.parametrize(
    "encode", [str, lambda way: quote(way, safe=""), lambda way: quote(quote(way, safe=""))]
)
def test_no_address_leads_out_of_what_is_shown(
    ready: TestClient, way: str, encode: Callable[[str], str]
) -> None:
    out = encode(way)
    places = [
        f"/static/{out}",
        f"/reports/{out}",
        f"/{out}",
        f"/api/runs/{out}",
        f"/api/runs/{out}/crew",
    ]
    places += [f"/api/runs/demo-001/{out}", f"/api/runs/demo-001/groups/{out}"]
    places += [f"/api/runs/demo-001/groups/1/0/{out}/0"]
    for place in places:
        scope_path = ready.get(place)
        assert "secret" not in scope_path.text.replace("secret.txt", ""), place
        assert "root:" not in scope_path.text


def test_a_raw_path_that_climbs_is_not_followed(showcase: Showcase, static: Path) -> None:
    with serving(showcase, static) as port:
        for path in (
            "/static/../secret.txt",
            "/static/%2e%2e/secret.txt",
            "/reports/..%2fsecret.txt",
        ):
            status, _, body = asked(port, path)
            assert status == 404, path
            assert b'"error"' in body


def test_a_link_in_the_static_folder_leads_nowhere(client: TestClient, static: Path) -> None:
    (static / "link.txt").symlink_to(static.parent / "secret.txt")
    assert client.get("/static/link.txt").status_code == 404
    assert client.get("/static/main.js").headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_a_page_can_only_read(client: TestClient, method: str) -> None:
    for path in ("/", "/api/runs", "/api/runs/demo-001/crew", "/static/main.js", "/nowhere"):
        answer = client.request(method, path)
        assert answer.status_code == 405
        assert answer.headers["allow"] == "GET, HEAD"
    assert client.head("/api/runs").status_code == 200
    assert client.head("/api/runs/demo-001/events").status_code == 200


def test_every_answer_tells_the_browser_what_it_may_do(client: TestClient) -> None:
    for path in ("/", "/api/runs", "/static/main.js", "/nowhere"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers


def test_a_name_of_somebody_else_that_leads_here_is_refused(client: TestClient) -> None:
    for host in ("evil.example", "evil.example:7117", "127.0.0.1.evil.example", "", "[::2]:7117"):
        assert client.get("/api/runs", headers={"Host": host}).status_code == 403, host
    for host in ("localhost", "LOCALHOST:7117", "127.0.0.1:7117", "[::1]:7117", "[::1]"):
        assert client.get("/api/runs", headers={"Host": host}).status_code == 200, host


def test_another_address_takes_a_token_and_keeps_it_as_a_cookie(
    showcase: Showcase, static: Path
) -> None:
    app = make_app(showcase, Access(hosts=(), token="right"), static=static)
    client = TestClient(app, base_url="http://box.example:7117")
    for path in (
        "/",
        "/api/runs",
        "/static/main.js",
        "/?token=wrong",
        "/?token=",
        "/?token=rightx",
    ):
        answer = client.get(path)
        assert answer.status_code == 403, path
        assert "set-cookie" not in answer.headers
        assert "right" not in answer.text
    cookie = client.get("/?token=right").headers["set-cookie"]
    assert cookie.endswith("; Path=/; HttpOnly; SameSite=Strict")
    assert client.get("/api/runs").status_code == 200
    bare = TestClient(app, base_url="http://box.example:7117")
    assert bare.get("/api/runs", headers={"Authorization": "Bearer right"}).status_code == 200
    assert bare.get("/api/runs", headers={"Cookie": "=;;;\x7f"}).status_code == 403


def test_a_page_of_any_name_without_a_token_cannot_be_made() -> None:
    with pytest.raises(AssertionError, match="needs a token"):
        Access(hosts=())
    assert Access().hosts == LOOPBACK


def test_a_report_is_sandboxed(tmp_path: Path, static: Path) -> None:
    study = tmp_path / "study-x"
    study.mkdir()
    (study / "report.html").write_text(f"<p>{EVIL}")
    with showing(study) as showcase:
        client = TestClient(make_app(showcase, Access(), static=static), base_url=BASE)
        assert [one["kind"] for one in client.get("/api/runs").json()] == ["report"]
        answer = client.get("/reports/study-x-report")
        assert answer.text == f"<p>{EVIL}"
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("sandbox; default-src 'none'; ")
        assert "script" not in policy
        assert client.get("/api/runs/study-x-report/crew").status_code == 404
        (study / "report.html").unlink()
        (study / "report.html").symlink_to(tmp_path / "elsewhere.html")
        (tmp_path / "elsewhere.html").write_text("secret")
        assert client.get("/reports/study-x-report").status_code == 404


def test_large_answers_are_compressed_and_small_ones_are_not(ready: TestClient) -> None:
    assert ready.get("/api/schema").headers["content-encoding"] == "gzip"
    assert "content-encoding" not in ready.get("/api/runs").headers


def test_versioned_files_are_kept_and_others_are_asked_for_again(client: TestClient) -> None:
    assert "immutable" in client.get("/static/main.js?v=1").headers["cache-control"]
    assert client.get("/static/main.js").headers["cache-control"] == "no-cache"
    tag = client.get("/static/main.js").headers["etag"]
    assert client.get("/static/main.js", headers={"If-None-Match": tag}).status_code == 304


def test_notes_of_the_log_come_with_the_crew(ready: TestClient) -> None:
    notes = ready.get("/api/runs/demo-001/crew").json()["notes"]
    assert notes == ["the hub is not running", "no prompts: the task is not here"]


# A real server


@contextmanager
def serving(showcase: Showcase, static: Path, port: int = 0) -> Iterator[int]:
    server: uvicorn.Server
    app = make_app(showcase, Access(), lambda: server.should_exit, static)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none"))
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen()
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "the server does not end"


def asked(port: int, path: str) -> tuple[int, Mapping[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def announced(answer: http.client.HTTPResponse) -> dict[str, Any]:
    """The next event."""
    while (line := answer.readline()) != b"event: changed\n":
        assert line, "the events ended"
    told: dict[str, Any] = json.loads(answer.readline().removeprefix(b"data: "))
    return told


def test_a_new_round_is_announced(showcase: Showcase, static: Path, run: Path) -> None:
    with serving(showcase, static) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        connection.request("GET", "/api/runs/demo-001/events", headers={"Accept-Encoding": "gzip"})
        answer = connection.getresponse()
        assert answer.getheader("content-type") == "text/event-stream; charset=utf-8"
        assert answer.getheader("content-encoding") is None
        while announced(answer)["round"] != 1:
            pass
        with (run / "metrics.jsonl").open("a") as file:
            file.write("{}\n")
        assert announced(answer) == {"round": 2, "indexed": 1.0, "is_over": False}
        # others are answered meanwhile
        assert asked(port, "/api/runs/demo-001/crew")[0] == 200
        assert showcase._users["demo-001"] == 1
        answer.close()
        connection.close()
        eventually(lambda: showcase._users["demo-001"] == 0)


@pytest.mark.slow
def test_the_server_ends_while_somebody_listens(showcase: Showcase, static: Path) -> None:
    with serving(showcase, static) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        connection.request("GET", "/api/runs/demo-001/events")
        answer = connection.getresponse()
        announced(answer)
    connection.close()
    assert showcase._users["demo-001"] == 0


# Threads and memory


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_closing_ends_the_threads_of_a_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real keeper of a log
    monkeypatch.setattr(shown, "MetricsView", FakeMetrics)
    one = ShownRun("closing", run)
    own = {"watch closing", "rollouts closing", "log demo-001"}
    assert own <= threads()
    one.close()
    assert not own & threads()


def test_only_so_many_runs_are_looked_at(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown, "MOST_AWAKE", 2)
    others = [tmp_path / f"run-{number}" for number in range(4)]
    for folder in others:
        folder.mkdir()
        (folder / "metrics.jsonl").touch()
    with showing(*others) as showcase, showcase.using("run-0"):
        for number in (1, 2, 3):
            with showcase.using(f"run-{number}"):
                pass
        assert {f"watch run-{number}" for number in (0, 3)} <= threads()  # in use, and newest
        assert not {"watch run-1", "watch run-2"} & threads()
    assert not {name for name in threads() if name.startswith("watch run-")}


def test_questions_go_before_looks_at_files() -> None:
    questions, order = shown.QuestionsFirst(), list[str]()
    asking = threading.Event()

    def look() -> None:
        asking.wait(PATIENCE_S)
        questions.wait()
        order.append("looked")

    looker = threading.Thread(target=look)
    looker.start()
    with questions.asking():
        asking.set()
        RealClock().sleep_s(0.05)
        order.append("asked")
    looker.join(PATIENCE_S)
    assert order == ["asked", "looked"]


# The schema


def test_the_schema_describes_the_answers(ready: TestClient) -> None:
    schema = ready.get("/api/schema").json()
    addresses, parts = schema["addresses"], schema["components"]
    assert fits(ready.get("/api/runs").json(), addresses["/api/runs"]["answer"], parts)
    group = ready.get("/api/runs/demo-001/groups/1").json()
    described = addresses["/api/runs/{id}/groups/{position}"]["answer"]
    assert fits(group, described, parts)
    assert not fits(group | {"round": "one"}, described, parts)
    assert not fits(group | {"more": 1}, described, parts)
    assert not fits({"position": 1}, described, parts)
    assert fits(ready.get("/api/runs/other/crew").json(), schema["refused"], parts)


def test_the_page_of_the_docs_has_every_address_parameter_and_struct() -> None:
    words = (Path(__file__).parents[2] / "docs" / "watch.md").read_text()
    for address in ADDRESSES:
        path = address.path.replace("{", "").replace("}", "")
        shown_path = "/".join(
            part.upper() if f"{{{part}}}" in address.path else part for part in path.split("/")
        )
        assert f"`{shown_path}`" in words
        assert f"`{address.answer.__name__}`" in words
        for name in address.parameters:
            assert f"`{name}`" in words, name
    assert make_schema()["addresses"].keys() >= {"/api/runs", "/api/runs/{id}/events"}
