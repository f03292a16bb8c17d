"""Where the log is that a user means, and how it is reached: a file, a peer's login, a hub's login,
or a hub's server for a while.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from motley.archive.examine import Examiner
from motley.archive.reading import Archive, FileSource, StreamSource
from motley.clock import Deadline, RealClock
from motley.config import parse_config
from motley.exchange import Entry, Header, LogError, WireError, unpack
from motley.learning.hearing import Lots
from motley.records import Charter
from motley.trust import Identity

if TYPE_CHECKING:
    from motley.distributed.register import HubState
    from motley.exchange.nats.connection import Login
    from motley.exchange.nats.log import LotOf, NatsLog

LEADER_S, RETRY_S = 60.0, 0.25  # until a cluster can be read

# what tells that a folder has a log
_HOLDERS = ("hub.json", "member.json", "hub/hub.json", "groups/log.bin")


def find_log(target: str, runs: Path = Path("runs")) -> Path:
    """The folder of the log: `target`, or the hub, peer or newest run of a crew so named."""
    for folder in (Path(target), *_folders_of(target, runs)):
        if any((folder / name).is_file() for name in _HOLDERS):
            return folder
    raise ValueError(
        f"there is no log at {target}: it is no folder with {', '.join(_HOLDERS[:-1])} or "
        f"{_HOLDERS[-1]}, and no crew with a folder "
        f"{runs}/{target}-hub, {runs}/{target}-PEER or {runs}/{target}-NNN; give a run folder, or "
        "the name of a crew that has one"
    )


def _folders_of(crew: str, runs: Path) -> list[Path]:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", crew):
        return []
    peers = sorted(
        runs.glob(f"{crew}-*/member.json"), key=lambda path: path.stat().st_mtime, reverse=True
    )
    # CREW-* is also what CREW-TWO's folders are called
    ours = [path.parent for path in peers if _crew_of(path) == crew]
    numbers = [path.name.removeprefix(f"{crew}-") for path in runs.glob(f"{crew}-*")]
    numbered = sorted(
        (number for number in numbers if re.fullmatch(r"\d{3,}", number)), key=int, reverse=True
    )
    return [runs / f"{crew}-hub", *ours, *(runs / f"{crew}-{number}" for number in numbered)]


class _Named(msgspec.Struct):
    """What tells whose member.json it is."""

    crew: str = ""


def _crew_of(path: Path) -> str:
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(path.read_bytes(), type=_Named).crew
    return ""


def hub_of(folder: Path) -> Path | None:
    """The folder of the hub as whose owner the log of a folder is read; None: it is not."""
    beside = folder.resolve().parent.parent / "hub"  # of a crew of several processes
    is_of_crew = (folder / "member.json").is_file() and folder.resolve().parent.name == "peers"
    for hub, may_be in ((folder, True), (beside, is_of_crew), (folder / "hub", True)):
        if may_be and (hub / "hub.json").is_file():
            return hub
    return None


def open_log(folder: Path, may_start: bool = True) -> AbstractContextManager[Archive]:
    """The log of a folder, for the time of a `with`. `may_start`: the server of a hub that does not
    run is started meanwhile, which keeps the hub from starting.
    """
    if hub := hub_of(folder):
        return _of_hub(hub, folder, may_start)
    if (folder / "member.json").is_file():
        return _of_member(folder)
    return _of_file(folder)


@contextmanager
def _of_file(folder: Path) -> Iterator[Archive]:
    source = FileSource(folder / "groups" / "log.bin")
    crew, hub = "", b""
    # a log begins with its charter; only where it does not, all is looked through
    for entry in _lazily(lambda: source.read(0, 1), source.of_hub):
        with suppress(WireError):
            header = Header.of(unpack(entry.record).body)
            if isinstance(header.content(), Charter):
                crew, hub = header.crew, header.stamp.key
                break
    yield Archive(folder, crew, hub, source)


def _lazily(*reads: Callable[[], list[Entry]]) -> Iterator[Entry]:
    for read in reads:
        yield from read()


@contextmanager
def _of_member(folder: Path) -> Iterator[Archive]:
    from motley.distributed.enrolment import read_membership

    try:
        membership = read_membership(folder)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{folder / 'member.json'} cannot be read: {error}; join again with the line that the "
            "hub printed"
        ) from None
    key = must_exist(folder / "peer.key", "join again with the line that the hub printed")
    crew, hub = membership.crew, membership.hub
    with connected(membership.login(Identity.kept_at(key)), crew, hub) as source:
        yield Archive(folder, crew, hub, source)


@contextmanager
def _of_hub(hub: Path, folder: Path, may_start: bool) -> Iterator[Archive]:
    """`folder` is the hub's, or that of the run whose hub it is."""
    from motley.distributed.register import hub_login, read_state

    state = read_state(hub)
    key = must_exist(
        hub / "hub.key", "only the folder that motley hub printed can be read as its hub"
    )
    served, own = _served(hub, state) if may_start else nullcontext(), Identity.kept_at(key).public
    with served, connected(hub_login(hub, state), state.crew, own) as source:
        yield Archive(folder, state.crew, own, source)


@contextmanager
def _served(folder: Path, state: HubState) -> Iterator[None]:
    """A server for the time of reading, if the hub has one of its own and that is not running."""
    from motley.distributed.hub import Hub
    from motley.distributed.servers import Servers

    servers = Servers.of(state, folder, lambda text: None, RealClock())
    if servers:
        must_exist(
            folder / "server" / "server.json", "this hub has never run: start it with motley hub"
        )
    if not servers or servers.any_alive:
        yield
        return
    try:
        # holds the folder, so that no hub starts while its server is ours
        hub = Hub(folder, state, lambda text: None)
    except ValueError:
        raise ValueError(
            f"the hub of {folder} is just starting or stopping; try again in a moment"
        ) from None
    taken_over = False
    try:
        taken_over = hub.servers.start()
        yield
    finally:
        hub.close(stop_server=not taken_over)


@contextmanager
def connected(login: Login, crew: str, hub: bytes) -> Iterator[StreamSource]:
    """`hub`: the key whose charter counts."""
    from motley.exchange.nats.connection import Connection
    from motley.exchange.nats.log import NatsLog

    with closing(Connection(login)) as connection:
        log = NatsLog(connection, crew)
        if len(login.urls) > 1:
            _wait_for_leader(log)
        yield StreamSource(NatsLog(connection, crew, _lot_of(log, crew, hub)))


def _lot_of(log: NatsLog, crew: str, hub: bytes) -> LotOf | None:
    """Where groups stand, by the charter, which is the first record; None: in no lots."""
    examiner = Examiner(crew, hub)
    for entry in log.read(0, 1):
        examiner.look(entry)
    charter = examiner.charter
    if charter is None or not charter.lots:
        return None
    return Lots(parse_config(charter.config, source="the crew's charter")).of_group


def _wait_for_leader(log: NatsLog) -> None:
    """Servers of a cluster that have just started choose one among them first."""
    clock = log.connection.clock
    deadline = Deadline(clock, LEADER_S)
    while True:
        try:
            log.read(0, 1)
            return
        except LogError:
            if deadline.passed:
                raise
            clock.sleep_s(RETRY_S)


def must_exist(path: Path, remedy: str) -> Path:
    if not path.is_file():
        raise ValueError(f"{path} is missing, and without it the log cannot be read; {remedy}")
    return path
