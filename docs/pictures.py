"""Draw the README's pictures: python docs/pictures.py [OUT]

    curves.svg    a crew's curves, from docs/results/specialists_curves.jsonl
    way.svg       the way of the data: peers, the log, peers

The same records give the same text. To record anew:

    motley train crews/specialists.toml --objective uplift/relative --alone

and keep `round`, `peer` and `heldout` of the lines that have accuracies, with `run` "crew" or
"alone".
"""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from motley.reports.drawing import Curve, panels, standalone

DOCS = Path(__file__).parent
RECORDS = DOCS / "results" / "specialists_curves.jsonl"
PEERS = (
    ("small", "0.3M, all of it trains"),
    ("deep", "1M, all of it trains"),
    ("wide-lora", "1M, a LoRA trains"),
)


class Point(msgspec.Struct, frozen=True):
    run: str
    round: int
    peer: str
    heldout: dict[str, float]


def read_points(path: Path) -> list[Point]:
    return [msgspec.json.decode(line, type=Point) for line in path.read_bytes().splitlines()]


# A crew's curves


def curves(points: Sequence[Point]) -> str:
    """A panel per peer: the kind it was best at, and the others, in the crew and alone."""
    charts = {
        peer: [
            _curve("own kind, in the crew", points, "crew", peer, own=True),
            _curve("others' kinds, in the crew", points, "crew", peer, own=False),
            _curve(
                "others' kinds, alone with three times the sampling",
                points,
                "alone",
                peer,
                own=False,
            ),
        ]
        for peer in dict.fromkeys(point.peer for point in points)
    }
    title = "Held-out accuracy of three specialists that learn from each other"
    return standalone(panels(title, charts, "round", "held-out accuracy", (0.0, 1.0)))


def _curve(label: str, points: Iterable[Point], run: str, peer: str, own: bool) -> Curve:
    mine = sorted((p for p in points if (p.run, p.peer) == (run, peer)), key=lambda p: p.round)
    best = max(mine[0].heldout, key=lambda kind: mine[0].heldout[kind])
    values = [[v for kind, v in p.heldout.items() if (kind == best) == own] for p in mine]
    return Curve(label, [p.round for p in mine], [sum(some) / len(some) for some in values])


# The way of the data


def way() -> str:
    body = [
        _text(110, 20, "each samples", "title"),
        _text(650, 20, "each learns from all", "title"),
    ]
    for number, (name, what) in enumerate(PEERS):
        top = 34 + 72 * number
        body += [_box(10, top, 200, 52, number), _text(110, top + 22, name, "title")]
        body += [_text(110, top + 40, what), _box(550, top, 200, 52, number)]
        body += [
            _text(650, top + 22, name, "title"),
            _text(650, top + 40, "checks, weighs, learns"),
        ]
        body += [_arrow(212, top + 26, 284, 132), _arrow(476, 132, 548, top + 26)]
    body += [
        _box(288, 72, 184, 120, 7),
        _text(380, 98, "one log of groups", "title"),
        _text(380, 122, "tokens"),
        _text(380, 140, "log-probs"),
        _text(380, 158, "rewards, signed"),
        _text(380, 182, "no weights, no gradients"),
    ]
    title = "Peers share what they sampled over one log; each learns from all of it"
    size = 'viewBox="0 0 760 250" width="760" height="250"'
    head = f'<svg class="chart" {size} role="img" aria-label="{title}">'
    return standalone("\n".join([head, *body, "</svg>"]))


def _text(x: int, y: int, text: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}"{named} text-anchor="middle">{html.escape(text)}</text>'


def _box(x: int, y: int, width: int, height: int, colour: int) -> str:
    place = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="8"'
    return f'<rect class="band b{colour}" {place}/><rect class="line s{colour}" {place}/>'


def _arrow(x: int, y: int, to_x: int, to_y: int) -> str:
    """A curve that leaves and arrives level, with a head."""
    middle = (x + to_x) // 2
    head = f"M{to_x - 8} {to_y - 5}L{to_x} {to_y}L{to_x - 8} {to_y + 5}"
    return (
        f'<path class="line s7" d="M{x} {y}C{middle} {y} {middle} {to_y} {to_x} {to_y}"/>'
        f'<path class="line s7" d="{head}"/>'
    )


def pictures() -> dict[str, str]:
    return {"curves.svg": curves(read_points(RECORDS)), "way.svg": way()}


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "pictures"
    out.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (out / name).write_text(text, encoding="utf-8")
