"""Commands for who runs a crew's log: `motley hub`, and `motley node` for its cluster's other
machines.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.live import Live
from rich.table import Table

from motley.cli.common import (
    CrewFile,
    Settings,
    app,
    console,
    plain_errors,
    say,
    say_choice,
    stop_on_interrupt,
    tell,
)
from motley.config import CrewConfig, read_config

if TYPE_CHECKING:
    from motley.distributed.hub import Hub
    from motley.distributed.register import Place
    from motley.exchange.nats.cluster import Node
    from motley.exchange.nats.presence import Heard

DEFAULT_PORT = 4222
MOST_REPLICAS = 5  # which JetStream keeps


Nats = Annotated[
    str,
    typer.Option(
        help=(
            "Use this NATS server (nats://...) instead of starting one; of a cluster all, with "
            "commas between."
        )
    ),
]
Replicas = Annotated[int, typer.Option(help="Keep everything on so many servers: 1, 3 or 5.")]
Nodes = Annotated[
    str,
    typer.Option(
        help="Where the other servers are, HOST:PORT with commas between; here otherwise."
    ),
]
Status = Annotated[
    bool, typer.Option("--status", help="Say how every server of a cluster is, and end.")
]


@app.command()
def hub(
    crew_file: CrewFile,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every network of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = DEFAULT_PORT,
    public: Annotated[
        str,
        typer.Option(
            help="Name or address under which peers reach this machine, if it is not --host."
        ),
    ] = "",
    tls: Annotated[
        str, typer.Option(help="'self' makes a certificate; or CERTIFICATE.pem,KEY.pem.")
    ] = "",
    nats: Nats = "",
    replicas: Replicas = 1,
    nodes: Nodes = "",
    status: Status = False,
    revoke: Annotated[str, typer.Option(help="Shut this peer out, and end.")] = "",
    invite: Annotated[str, typer.Option(help="Make a new invitation for this peer, and end.")] = "",
    invite_days: Annotated[
        float, typer.Option(help="How long invitations are good; 0: until they are used.")
    ] = 7.0,
    pardon: Annotated[
        str, typer.Option(help="Let this peer write again, which had sent too much, and end.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="The hub's folder; runs/CREW-hub otherwise.")
    ] = None,
    settings: Settings = None,
) -> None:
    """Run the log of a crew for peers on other machines, and print a line for each to paste.

    Ctrl-C stops it, the same line goes on.
    """
    with plain_errors():
        config = say_choice(read_config(crew_file, settings or ()))
        folder = out or Path("runs") / f"{config.crew.name}-hub"
        if status:
            return _tell_status(folder)
        if revoke or invite or pardon:
            return _order(folder, revoke, invite, pardon, invite_days)
        wanted = ServerOptions(host, port, public, tls, nats, replicas, nodes)
        _run(config, folder, _place(folder, wanted), invite_days)


def _tell_status(folder: Path) -> None:
    from motley.clock import RealClock
    from motley.distributed.nodes import nodes_of

    tell("\n".join(nodes_of(folder, RealClock())))


def _order(folder: Path, revoke: str, invite: str, pardon: str, invite_days: float) -> None:
    from motley.distributed.orders import give_order
    from motley.distributed.register import Order

    order = Order("invite", invite, days=invite_days)
    if revoke or pardon:
        order = Order("revoke", revoke) if revoke else Order("pardon", pardon)
    tell(give_order(folder, order))


def _run(config: CrewConfig, folder: Path, place: Place, invite_days: float) -> None:
    from motley.clock import RealClock
    from motley.distributed.hub import Hub
    from motley.runs.checking import NOBODY, check_config

    check_config(config, mine=NOBODY)
    running = Hub.open(config, folder, place, say, invite_days=invite_days)
    try:
        for path in running.far_nodes.write_files(RealClock()):
            tell(f"bring {path} to its machine, secretly, and run there: motley node {path.name}")
        running.start()
        tell(f"hub of crew {config.crew.name} at {place.url}, folder {folder}")
        _show_invitations(running)
        _serve(running)
    finally:
        running.close()


def _show_invitations(running: Hub) -> None:
    for peer, line in running.register.invitations().items():
        tell(f"\n{peer}{_until(running, peer)}:\n{line}")
    tell("")


def _until(running: Hub, peer: str) -> str:
    from motley.distributed.register import day_of

    end_s = running.register.state.expires_s.get(peer, 0.0)
    return f", until {day_of(end_s)}" if end_s else ""


class ServerOptions(NamedTuple):
    """Where the log shall be, as the options say it."""

    host: str
    port: int
    public: str
    tls: str
    nats: str
    replicas: int
    nodes: str

    @property
    def name(self) -> str:
        return self.public or (own_address() if self.host == "0.0.0.0" else self.host)


def _place(folder: Path, wanted: ServerOptions) -> Place:
    import msgspec

    from motley.distributed.register import Place
    from motley.exchange.nats.cluster import address_of
    from motley.exchange.nats.connection import domain_of, urls_of

    if wanted.nats:
        if wanted.nodes:
            raise ValueError("--nodes are those of a hub's own cluster; leave them out with --nats")
        servers = urls_of(wanted.nats)
        if domain_of(wanted.nats):
            raise ValueError(
                f"--nats {wanted.nats} is the address of a leaf node; name the server that is to "
                "have the streams, and leave ?domain= to peers of other regions"
            )
        return Place(url=",".join(servers), replicas=_replicas(wanted.replicas))
    nodes = _nodes(wanted)
    place = _shown(folder, wanted)
    if not nodes:
        return place
    url = address_of(nodes, "tls" if place.certificate else "nats")
    return msgspec.structs.replace(place, url=url, replicas=len(nodes), nodes=nodes)


def _shown(folder: Path, wanted: ServerOptions) -> Place:
    """Where the first server is, and the certificate that all show."""
    from motley.distributed.register import Place
    from motley.exchange.nats.server import self_signed

    name, host, port, tls = wanted.name, wanted.host, wanted.port, wanted.tls
    if not tls:
        return Place(url=f"nats://{name}:{port}", host=host, port=port)
    pair = self_signed(folder / "server", name) if tls == "self" else _pair(tls)
    return Place(
        url=f"tls://{name}:{port}",
        host=host,
        port=port,
        certificate=(str(pair[0].resolve()), str(pair[1].resolve())),
        pinned=tls == "self",
    )


def _pair(tls: str) -> tuple[Path, Path]:
    paths = [Path(part).resolve() for part in tls.split(",")]
    if len(paths) != 2 or not all(path.is_file() for path in paths):
        raise ValueError(
            f"--tls {tls} is neither 'self' nor two files; give CERTIFICATE.pem,KEY.pem"
        )
    return paths[0], paths[1]


def _nodes(wanted: ServerOptions) -> tuple[Node, ...]:
    """All of a cluster: the first at --host and --port, the others at --nodes or behind it."""
    from motley.exchange.nats.cluster import ROUTES_ABOVE, Node

    far = [_address(given) for given in wanted.nodes.split(",")] if wanted.nodes else []
    replicas = _replicas(wanted.replicas if wanted.replicas > 1 or not far else len(far) + 1)
    if far and len(far) != replicas - 1:
        raise ValueError(
            f"--nodes has {len(far)} nodes beside this one, and --replicas {replicas} needs "
            f"{replicas - 1}; name that many, or leave one of the two options out"
        )
    if replicas == 1:
        return ()
    here = Node(
        number=1,
        name=wanted.name,
        host=wanted.host,
        port=wanted.port,
        route_port=wanted.port + ROUTES_ABOVE,
    )
    return (here, *(_node(here, number, far) for number in range(2, replicas + 1)))


def _node(here: Node, number: int, far: list[tuple[str, int]]) -> Node:
    import msgspec

    from motley.exchange.nats.cluster import ROUTES_ABOVE

    if not far:
        port = here.port + number - 1
        return msgspec.structs.replace(
            here, number=number, port=port, route_port=port + ROUTES_ABOVE
        )
    name, port = far[number - 2]
    return msgspec.structs.replace(
        here,
        number=number,
        name=name,
        host="0.0.0.0",
        port=port,
        route_port=port + ROUTES_ABOVE,
        here=False,
    )


def _address(given: str) -> tuple[str, int]:
    name, _, port = given.strip().partition(":")
    if not name or not (port or str(DEFAULT_PORT)).isdigit():
        raise ValueError(
            f"--nodes {given!r} is no address; expected HOST or HOST:PORT, with commas between"
        )
    return name, int(port or DEFAULT_PORT)


def _replicas(wanted: int) -> int:
    if wanted not in range(1, MOST_REPLICAS + 1, 2):
        raise ValueError(
            f"--replicas {wanted}: expected 1, 3 or {MOST_REPLICAS}; of an even number no more "
            "may be lost than of one less"
        )
    return wanted


def own_address() -> str:
    """The address of this machine on the network it would leave by; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))
            address: str = probe.getsockname()[0]
        except OSError:
            return socket.gethostname()
        return address


def _serve(running: Hub) -> None:
    states: dict[str, str] = {}
    with (
        stop_on_interrupt("stopping") as stop_asked,
        Live(console=console, auto_refresh=False, transient=True) as live,
    ):
        while not stop_asked():
            running.tick()
            heard = dict(running.office.presence.heard)
            if console.is_terminal:
                live.update(_crew_table(running, heard), refresh=True)
            else:
                for peer, h in heard.items():
                    if h.gone and h.state != states.get(peer):
                        say(
                            f"{peer} {'has' if h.state == 'left' else 'is'} {h.state} after round "
                            f"{h.beat.round}"
                        )
            states = {peer: h.state for peer, h in heard.items()}


def _crew_table(running: Hub, heard: dict[str, Heard]) -> Table:
    state = running.register.state
    table = Table(title=f"crew {state.crew}", caption=running.nodes.words or None)
    for column in ("peer", "", "round", "heard", "to be sent"):
        table.add_column(column)
    for peer in [*state.keys, *state.invited, *state.revoked]:
        if peer in heard:
            h = heard[peer]
            table.add_row(
                peer,
                "may not write: it sent too much" if peer in state.muted else h.state,
                str(h.beat.round),
                f"{h.ago_s:.0f} s ago",
                str(h.beat.buffered),
            )
        else:
            table.add_row(
                peer,
                f"invited{_until(running, peer)}"
                if peer in state.invited
                else "shut out"
                if peer in state.revoked
                else "not here",
            )
    return table


@app.command()
def node(
    file: Annotated[Path, typer.Argument(help="The file that the hub wrote for this machine.")],
    tls: Annotated[
        str,
        typer.Option(help="CERTIFICATE.pem,KEY.pem to show to peers, instead of the hub's own."),
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="The node's folder; runs/CREW-node-NUMBER otherwise.")
    ] = None,
) -> None:
    """Run one server of a hub's cluster on this machine.

    Ctrl-C stops it, the same line goes on. The log goes on meanwhile, if most of the others run.
    """
    with plain_errors():
        from motley.distributed.node import FarNode
        from motley.distributed.nodes import read_node_file

        given = read_node_file(file)
        me = given.me
        folder = out or Path("runs") / f"{given.crew}-node-{me.number}"
        running = FarNode(given, folder, say, certificate=_pair(tls) if tls else None)
        try:
            running.start()
            tell(
                f"node {me.number} of {len(given.nodes)} of crew {given.crew} at "
                f"{me.name}:{me.port}, folder {folder}"
            )
            with stop_on_interrupt("stopping") as stop_asked:
                while not stop_asked():
                    running.tick()
        finally:
            running.close()
