"""Chromium, driven as a user drives it, and the page of runs that it looks at."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException, TimeoutException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from dashboard.test_server import serving
from hubs import PATIENCE_S
from motley.dashboard.server import STATIC
from motley.dashboard.shown import Showcase
from motley.dashboard.targets import find_targets

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"
# as root in a container, without a screen, and without asking anybody anything
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
NETWORKED = ("http", "https", "ws", "wss")
Theme = Literal["light", "dark"]
WIDE, PHONE = 1440, 390
VIEWS = ("crew", "rollouts", "discarded", "offpolicy", "trust", "speed", "compare")


def missing() -> str:
    """What this machine lacks, and how to get it; nothing if all is there."""
    if not any(map(shutil.which, BROWSERS)):
        return "needs Chromium: apt-get install chromium chromium-driver"
    if not shutil.which(DRIVER):
        return f"needs {DRIVER}: apt-get install chromium-driver"
    return ""


def axe() -> Path | None:
    """axe-core's script: of MOTLEY_AXE, a file or a folder, or of npm's own folders."""
    named = os.environ.get("MOTLEY_AXE")
    folders = [Path(named)] if named else _npm_folders()
    found = (
        path
        for folder in folders
        for path in (folder, folder / "axe.min.js", folder / "axe-core" / "axe.min.js")
        if path.is_file()
    )
    return next(found, None)


def _npm_folders() -> list[Path]:
    if not shutil.which("npm"):
        return []
    asked = [["npm", "root"], ["npm", "root", "--global"]]
    said = [subprocess.run(one, capture_output=True, text=True, check=False) for one in asked]
    return [Path(one.stdout.strip()) for one in said if one.stdout.strip()]


@contextmanager
def page_at(*targets: Path, port: int = 0) -> Iterator[str]:
    """The address of a page that shows these; port 0: any free one."""
    showcase = Showcase(find_targets([str(target) for target in targets]))
    try:
        with serving(showcase, STATIC, port) as bound:
            yield f"http://127.0.0.1:{bound}/"
    finally:
        showcase.close()


class Browser:
    """One window of Chromium, and short words for what a user does in it."""

    def __init__(self, profile: Path) -> None:
        options = Options()
        options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which(DRIVER)))
        self.asked: list[str] = []  # addresses of all requests
        self.errors: list[str] = []  # of the console
        self.home = ""
        self.size()

    def close(self) -> None:
        self.driver.quit()

    # Where it is

    def size(self, width: int = WIDE, height: int = 900, theme: Theme = "light") -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        touch = {"enabled": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", touch)
        colours = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": colours})

    def open(self, home: str, hash: str = "") -> None:
        """In a page that knows nothing yet."""
        self.home = home
        self.driver.get("about:blank")
        self.driver.get(home + hash)
        self.settled()

    def go(self, hash: str) -> None:
        """As a link within the page does."""
        self.run("location.hash = arguments[0]", hash)
        self.settled()

    def settled(self) -> None:
        """When the view that the address asks for is drawn."""
        self.until(
            lambda: self.run(
                "const main = document.querySelector('main'); const asked = "
                "location.hash.replace(/^#[/]?/, '').split('?')[0] || 'crew';"
                "return main.dataset.view === asked && !main.hasAttribute('aria-busy')"
            ),
            lambda: f"{self.driver.current_url} is not drawn: {self.run(PROBLEM)}",
        )

    @property
    def view(self) -> str:
        return str(self.run("return document.querySelector('main').dataset.view"))

    @property
    def hash(self) -> str:
        return str(self.run("return location.hash"))

    # What is there

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        """The first, as soon as there is one."""
        self.until(lambda: bool(self.all(selector)), lambda: f"there is no {selector}")
        return self.all(selector)[0]

    def text(self, selector: str) -> str:
        """Of an element's subtree, without what is hidden by style alone."""
        return str(self.run("return arguments[0].textContent", self.one(selector)))

    def until(
        self, happened: Callable[[], object], words: Callable[[], str] = lambda: "it never happened"
    ) -> None:
        try:
            WebDriverWait(
                self.driver,
                PATIENCE_S,
                poll_frequency=0.05,
                ignored_exceptions=[StaleElementReferenceException],
            ).until(lambda _: happened())
        except TimeoutException:
            raise AssertionError(words()) from None

    def click(self, selector: str) -> None:
        element = self.one(selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def keys(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    @property
    def focus(self) -> WebElement:
        return self.driver.switch_to.active_element

    # What it said and asked

    def hear(self) -> None:
        """Take down what the browser logged since the last time."""
        for entry in self.driver.get_log("browser"):
            if entry["level"] in ("SEVERE", "WARNING"):
                self.errors.append(str(entry["message"]))
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = message["params"]["request"]["url"]
                if urlsplit(url).scheme in NETWORKED:  # not the browser's own pages
                    self.asked.append(url)


PROBLEM = "return document.querySelector('#problem').textContent"
