"""Take the pictures of docs/watch.md, of a run whose objective filters:

motley demo --objective ftis --rounds 40 --out runs/pictures
PYTHONPATH=tests python tests/dashboard/screenshots.py runs/pictures [OUT]

They are written to docs/pictures, or to OUT. Chromium is needed: see test_browser.py.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from dashboard.browser import PHONE, WIDE, Browser, Theme, missing, page_at

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
MOST_BYTES = 200_000


class Shot(NamedTuple):
    name: str
    show: Callable[[Browser], None]
    width: int = WIDE
    height: int = 900
    theme: Theme = "light"


def crew(page: Browser) -> None:
    page.until(lambda: "not known" not in page.text(".cards"))


def discarded(page: Browser) -> None:
    page.go("#/discarded")


def off_policy(page: Browser) -> None:
    page.go("#/offpolicy")


def filtered(page: Browser) -> None:
    """By the three clicks of docs/watch.md."""
    page.go("#/discarded")
    page.click("[data-reason=filtered] a")
    page.click("#groups [data-position]")
    page.one("#verdict")


def rollouts(page: Browser) -> None:
    page.go("#/rollouts?rounds=20..")
    page.one("#groups .prompt a")


SHOTS = (
    Shot("watch_crew", crew, height=1000),
    Shot("watch_crew_dark", crew, height=1000, theme="dark"),
    Shot("watch_crew_phone", crew, PHONE, 844),
    Shot("watch_rollouts", rollouts, height=700),
    Shot("watch_formula", filtered, height=860),
    Shot("watch_discarded", discarded, height=760),
    Shot("watch_offpolicy", off_policy, height=700),
)


def take(run: Path, out: Path) -> Iterator[Path]:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, page_at(run) as home:
        page = Browser(Path(profile))
        try:
            for shot in SHOTS:
                page.size(shot.width, shot.height, shot.theme)
                page.open(home)
                page.until(lambda: page.text("#status").startswith("over"))
                shot.show(page)
                page.settled()
                page.run("document.activeElement.blur()")
                path = out / f"{shot.name}.png"
                page.driver.save_screenshot(str(path))
                yield path
        finally:
            page.close()


if __name__ == "__main__":
    if without := missing():
        sys.exit(without)
    for path in take(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else PICTURES):
        size = path.stat().st_size
        print(f"{path}: {size / 1000:.0f} kB" + (": too large" if size > MOST_BYTES else ""))
