"""How quickly the page of a long run opens and answers: `motley watch` in a process of its own,
asked over HTTP as a browser asks. Knows the page by its addresses only (docs/watch.md).
"""

from __future__ import annotations

import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

import msgspec

from motley.benchmarks.bench import Row
from motley.benchmarks.watching import GROUP_SIZE, TRACED_ROUNDS, Show, make_large_run
from motley.clock import Clock, Deadline, RealClock, timed

QUESTIONS = 20  # of each kind
OPENS_S, ANSWERS_MS, MOST_MB = 2.0, 300.0, 500.0  # what is to be reached
START_S, INDEXED_S = 120.0, 600.0  # after which something is wrong
AGAIN_S = 0.02  # until what was not there is asked for again
KEYS = ("reward", "loss", "grad_norm", "timing.learn_s", "timing.sampled_tokens_per_s")
SENDER_KEYS = ("senders.kl_k3", "senders.ratio.q95", "senders.weight.mean", "senders.ess")


class OpenPage(NamedTuple):
    """A run that can be asked about, and what is known of it."""

    ask: Callable[[str], bytes]  # the part of an address behind /api/runs/ID/
    rounds: int
    peers: list[str]
    first_s: float  # until the crew and its curves were there
    process: subprocess.Popen[str]


class _Crew(msgspec.Struct):
    """What is needed of an answer."""

    indexed: float


class _Served(msgspec.Struct):
    id: str


def watch_benchmark(
    show: Show, rounds: int, peers: int, seed: int = 0, clock: Clock = RealClock()
) -> list[Row]:
    """A row per figure: what, value, unit, and what it must reach."""
    with tempfile.TemporaryDirectory(prefix="motley-watch-") as place:
        folder = Path(place) / "large"
        make_large_run(folder, rounds, peers, seed, show)
        show("opening the page", 0, 1)
        with _opened(folder, rounds, peers, clock) as asked:
            return [
                _row("open: crew and curves are there", asked.first_s, "s", OPENS_S),
                *_asked_rows(asked, random.Random(seed), show, clock),
                _row("all files were looked at", _indexed_s(asked, clock), "s after that"),
                _row("memory", _peak_mb(asked.process.pid), "MB at most", MOST_MB),
            ]


@contextmanager
def _opened(folder: Path, rounds: int, peers: int, clock: Clock) -> Iterator[OpenPage]:
    """`motley watch`, from its start to its first answers."""
    command = [sys.executable, "-m", "motley", "watch", str(folder), "--port", "0", "--no-open"]
    start_s = clock.elapsed_s()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert process.stdout
        assert process.stderr
        address = re.search(r"http://\S+", process.stdout.readline())
        if address is None:
            process.wait(START_S)
            raise ValueError(f"motley watch did not come up: {process.stderr.read().strip()}")
        get = partial(_get, address[0], clock=clock)
        (run,) = msgspec.json.decode(get("api/runs"), type=list[_Served])
        ask = lambda rest: get(f"api/runs/{run.id}/{rest}")
        _ask_until_shown(ask, Deadline(clock, START_S), clock)
        names = [f"peer{number:02d}" for number in range(peers)]
        yield OpenPage(ask, rounds, names, clock.elapsed_s() - start_s, process)
    finally:
        process.terminate()
        process.communicate()


def _get(address: str, path: str, *, clock: Clock) -> bytes:
    """The answer; what is not read yet is asked for again, as the page does."""
    # of this machine, whatever proxy stands in the environment
    opener, deadline = build_opener(ProxyHandler({})), Deadline(clock, START_S)
    while True:
        try:
            with opener.open(address + path, timeout=START_S) as answer:
                return bytes(answer.read())
        except HTTPError as error:
            words = error.read().decode(errors="replace")
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE or deadline.passed:
                raise ValueError(f"the page does not answer {path}: {words[:500]}") from None
        clock.sleep_s(AGAIN_S)


def _ask_until_shown(ask: Callable[[str], bytes], deadline: Deadline, clock: Clock) -> None:
    """For the crew and its curves, until there are some: the page asks again when told to."""
    while b'"version":null' in ask("crew") or b'"points":[[' not in ask("curves?key=heldout"):
        if deadline.passed:
            raise ValueError(f"motley watch showed no curve in {START_S:.0f} s; try again")
        clock.sleep_s(AGAIN_S)


def _asked_rows(asked: OpenPage, rng: random.Random, show: Show, clock: Clock) -> Iterator[Row]:
    kinds = _questions(asked)
    for done, (name, question) in enumerate(kinds.items()):
        show(f"asking for {name}", done, len(kinds))
        paths = [question(rng) for _ in range(QUESTIONS)]
        answers = [timed(partial(asked.ask, path), clock) for path in paths]
        took_ms = [took_s * 1000 for _, took_s in answers]
        size_kb = max(len(content) for content, _ in answers) / 1000
        unit = f"ms, slowest of {QUESTIONS}; median {statistics.median(took_ms):.0f} ms"
        yield _row(name, max(took_ms), f"{unit}; up to {size_kb:.0f} kB", ANSWERS_MS)


def _questions(asked: OpenPage) -> dict[str, Callable[[random.Random], str]]:
    """What a reader may click on."""
    rounds, peers = asked.rounds, asked.peers
    num_groups = rounds * len(peers)

    def some_rounds(rng: random.Random) -> str:
        first, last = sorted(rng.choices(range(1, rounds + 1), k=2))
        return f"{first}..{last}"

    def filtered(rng: random.Random) -> str:
        filters = {
            "sender": rng.choice(peers),
            "kind": rng.choice(("reverse", "sort", "increment")),
            "rewards": rng.choice(("0..0.5", "1")),
            "fate": rng.choice(("learned", "filtered", "silent")),
            "rounds": some_rounds(rng),
            "text": str(rng.randrange(100)),
        }
        chosen = {name: filters[name] for name in rng.sample(sorted(filters), 2)}
        return "groups?" + urlencode(chosen | {"learner": rng.choice(peers)})

    def traced(rng: random.Random) -> str:
        lately = min(rounds, TRACED_ROUNDS) * len(peers)
        position = 3 + num_groups - 1 - rng.randrange(lately)  # behind charter and roster
        return f"groups/{position}/{rng.randrange(GROUP_SIZE)}/{rng.choice(peers)}/0"

    return {
        "crew": lambda rng: f"crew?rounds={some_rounds(rng)}",
        "curves": lambda rng: f"curves?key={rng.choice(KEYS)}&rounds={some_rounds(rng)}",
        "held-out curves": lambda rng: f"curves?key=heldout&rounds={some_rounds(rng)}",
        "curves by sender": lambda rng: (
            f"curves?key={rng.choice(SENDER_KEYS)}&rounds={some_rounds(rng)}"
        ),
        "groups": lambda rng: f"groups?after={rng.randrange(num_groups)}&limit=50",
        "groups by filter": filtered,
        "a group": lambda rng: f"groups/{3 + rng.randrange(num_groups)}",
        "a formula": traced,
        "discarded": lambda rng: f"discarded?learner={rng.choice(peers)}",
        "histograms": lambda rng: (
            f"histograms?learner={rng.choice(peers)}&sender={rng.choice(peers)}"
        ),
        "trust": lambda rng: "trust",
        "speed": lambda rng: "speed",
    }


def _indexed_s(asked: OpenPage, clock: Clock) -> float:
    """How long after the first answers every file was looked at to its end."""
    start_s, deadline = clock.elapsed_s(), Deadline(clock, INDEXED_S)
    while msgspec.json.decode(asked.ask("crew"), type=_Crew).indexed < 1 and not deadline.passed:
        clock.sleep_s(1.0)  # each answer takes time from looking
    return clock.elapsed_s() - start_s


def _row(what: str, value: float | None, unit: str, target: float | None = None) -> Row:
    return {
        "what": what,
        "value": None if value is None else round(value, 2),
        "unit": unit,
        "target": "" if target is None else f"< {target:g}",
    }


def _peak_mb(process: int) -> float | None:
    """The most memory that a process had, where the system tells."""
    status = Path(f"/proc/{process}/status")
    told = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(told[1]) * 1024 / 1e6 if told else None
