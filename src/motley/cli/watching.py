"""motley watch: a page that shows a crew; and the page beside a command that trains."""

from __future__ import annotations

import ipaddress
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from motley.cli.common import app, console, plain_errors, tell, warn
from motley.clock import Clock, Deadline, RealClock

if TYPE_CHECKING:
    import uvicorn

    from motley.dashboard.guard import Access, Guard

PORT = 7117
TRIED = 20  # ports, from that one on
EXTRA = "watch"
START_S = 60.0  # for the page of another process to say where it is
CLOSE_S = 5.0
ANY = ("0.0.0.0", "::", "")  # every network of this machine

Watch = Annotated[
    bool, typer.Option("--watch", help="Show the crew on a page in the browser, as it learns.")
]


@app.command()
def watch(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET...",
            help="Run folders, a peer's or a hub's; names of crews; folders of studies or sweeps.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help=f"Port to listen on; {PORT} or the next free one."),
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; any but this machine's own takes a token."),
    ] = "127.0.0.1",
    token: Annotated[
        bool, typer.Option("--token", help="Take a token here, too: others use this machine.")
    ] = False,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open the browser.")] = False,
    beside: Annotated[bool, typer.Option("--beside", hidden=True)] = False,
) -> None:
    """Show a crew, live or finished, on a page in the browser. Ctrl-C ends it."""
    with plain_errors():
        _need_extra("motley watch")
        from motley.dashboard.server import make_app
        from motley.dashboard.shown import Showcase
        from motley.dashboard.targets import find_targets

        showcase = Showcase(find_targets(targets or [], may_come=beside))
        listening = _listen(host, port)
        access = _access(host, token)
        address = _address(host, listening.getsockname()[1], access)
        server = _server(make_app(showcase, access, lambda: server.should_exit))
        if beside:
            _stand_back(server)
            sys.stdout.write(f"{address}\n")
            sys.stdout.flush()
        else:
            tell(f"watch {', '.join(one.name for one in showcase.served())} at {address}")
            _open(address, no_open)
        try:
            server.run(sockets=[listening])
        except KeyboardInterrupt:
            pass  # the way to end it
        finally:
            listening.close()
            showcase.close()


def _need_extra(wanted_by: str) -> None:
    from motley.tasks.extras import need

    for package in ("starlette", "uvicorn"):
        need(package, wanted_by, EXTRA)


def _listen(host: str, port: int | None) -> socket.socket:
    """A socket at the port, or at the next free one where none was asked for."""
    asked = range(PORT, PORT + TRIED) if port is None else (port,)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    trouble = ""
    for number in asked:
        listening = socket.socket(family)
        if os.name != "nt":  # there it would let two pages share a port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, number))
            listening.listen()
        except OSError as error:
            listening.close()
            trouble = error.strerror or str(error)
        else:
            return listening
    raise ValueError(
        f"the page cannot listen on {host}:{asked[0]}: {trouble}; choose another --port (0: any "
        "free one) or --host"
    )


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _access(host: str, with_token: bool) -> Access:
    from motley.dashboard.guard import LOOPBACK, Access

    if not _is_loopback(host):
        return Access(hosts=(), token=secrets.token_urlsafe(24))
    return Access((*LOOPBACK, _in_address(host)), secrets.token_urlsafe(24) if with_token else "")


def _in_address(host: str) -> str:
    return f"[{host}]" if ":" in host else host.lower()


def _address(host: str, port: int, access: Access) -> str:
    from motley.cli.hosting import own_address

    name = own_address() if host in ANY else host
    return f"http://{_in_address(name)}:{port}/" + (f"?token={access.token}" * bool(access.token))


def _server(page: Guard) -> uvicorn.Server:
    import uvicorn

    config = uvicorn.Config(
        page,
        log_level="error",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=3,
    )
    for name in ("SIGTERM", "SIGHUP"):  # which ends it as Ctrl-C does, with all that it opened
        if number := getattr(signal, name, None):
            signal.signal(number, signal.default_int_handler)
    return uvicorn.Server(config)


def _open(address: str, no_open: bool = False) -> None:
    """In the browser, where there is one to be seen."""
    shown = sys.platform in ("darwin", "win32") and not os.environ.get("SSH_CONNECTION")
    shown = shown or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    if shown and not no_open:
        webbrowser.open(address)


# Beside a command that trains


def _say(text: str) -> None:
    """On stderr: what the command beside us prints may be read by a program."""
    Console(stderr=True, soft_wrap=True).print(text, highlight=False, markup=False)


def _stand_back(server: uvicorn.Server) -> None:
    """Let training go first, and end when the command does that this page is beside: it holds the
    other end of our input.
    """
    if hasattr(os, "nice"):
        os.nice(19)

    def wait() -> None:
        sys.stdin.buffer.read()
        server.should_exit = True

    threading.Thread(target=wait, name="end of the page", daemon=True).start()


@contextmanager
def page_beside(folder: Path, wanted: bool) -> Iterator[None]:
    """A page of a run, in a process of its own, while it trains; and at a terminal until Ctrl-C.

    A page that does not come up is a warning, and training goes on.
    """
    if not wanted:
        yield
        return
    _need_extra("--watch")
    page = _Page(folder)
    try:
        if page.address:
            _say(f"watch it at {page.address}")
            _open(page.address)
        yield
        if page.is_up and console.is_terminal:
            _say(f"the page stays at {page.address} until Ctrl-C")
            with suppress(KeyboardInterrupt):
                page.process.wait()
    finally:
        page.close()
        _say(f"open the page again with: motley watch {folder}")


class _Page:
    """The process of a page. In a session of its own: a Ctrl-C is for the command beside it."""

    def __init__(self, folder: Path, clock: Clock = RealClock()) -> None:
        command = [sys.executable, "-m", "motley", "watch", str(folder), "--beside"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        self._said: dict[str, str] = {}
        self._readers = [
            threading.Thread(target=self._read, args=(name, file), daemon=True)
            for name, file in (("out", self.process.stdout), ("error", self.process.stderr))
        ]
        for reader in self._readers:
            reader.start()
        deadline = Deadline(clock, START_S)
        while not self.address and self.is_up and not deadline.passed:
            clock.sleep_s(0.05)
        if not self.address:
            self.close()
            words = self._said.get("error", "").strip() or f"it said nothing for {START_S:.0f} s"
            warn(f"the page did not come up, and training goes on without it: {words}")

    @property
    def address(self) -> str:
        return self._said.get("out", "").strip()

    @property
    def is_up(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        assert self.process.stdin
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for reader in self._readers:
            reader.join(CLOSE_S)

    def _read(self, name: str, file: IO[str]) -> None:
        with file:
            for line in file:
                self._said[name] = self._said.get(name, "") + line
