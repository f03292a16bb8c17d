"""The server of the page: a starlette app that reads and never writes. docs/watch.md has its
addresses.

Questions are answered in threads, so that events go on meanwhile.
"""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from motley.dashboard.addresses import ADDRESSES, Address, Query
from motley.dashboard.answers import Changed, Refused, Served
from motley.dashboard.guard import REPORT_POLICY, TOKEN, Access, Guard, Json, refused
from motley.dashboard.loading import NotReadyError
from motley.dashboard.shown import Showcase, ShownRun

STATIC = Path(__file__).parent / "static"
LOOK_S = 0.25  # between looks for something to announce
GAP_S = 1.0  # between two announcements
BEAT_S = 15.0  # between signs of life, by which a client that is gone is noticed
GZIP_BYTES = 1024
RUN = "/api/runs/{id}"
# some machines' own tables say otherwise, and a browser takes a module by no other name
mimetypes.add_type("text/javascript", ".js")

Endpoint = Callable[[Request], Awaitable[Response]]
Closing = Callable[[], bool]


def make_app(
    showcase: Showcase, access: Access, closing: Closing = lambda: False, static: Path = STATIC
) -> Guard:
    """`closing`: the server is to end, so events end, too."""

    async def page(request: Request) -> Response:
        return FileResponse(static / "index.html", headers={"Cache-Control": "no-cache"})

    async def runs(request: Request) -> Response:
        _query(request, {})
        return Json(showcase.served())

    async def schema(request: Request) -> Response:
        _query(request, {})
        return Json(make_schema())

    async def report(request: Request) -> Response:
        _query(request, {})
        return await run_in_threadpool(_report, showcase.report(request.path_params["id"]))

    async def events(request: Request) -> Response:
        _query(request, {})
        return _announced(showcase, request, closing)

    app = Starlette(
        routes=[
            Route("/", page),
            Route("/api/runs", runs),
            Route("/api/schema", schema),
            Route(f"{RUN}/events", events),
            *(Route(f"{RUN}/{one.path}", _endpoint(showcase, one)) for one in ADDRESSES),
            Route("/reports/{id}", report),
            Mount("/static", _Static(directory=static, check_dir=False)),
        ],
        middleware=[Middleware(GZipMiddleware, minimum_size=GZIP_BYTES, compresslevel=5)],
        exception_handlers={
            HTTPException: _not_found,
            LookupError: _unknown,
            ValueError: _wrong,
            OSError: _out_of_reach,
            NotReadyError: _not_ready,
        },
    )
    return Guard(app, access)


def _query(request: Request, known: Mapping[str, str]) -> Query:
    items = [item for item in request.query_params.multi_items() if item[0] != TOKEN]
    path = {name: value for name, value in request.path_params.items() if name != "id"}
    return Query(items, known, path)


def _endpoint(showcase: Showcase, address: Address) -> Endpoint:
    def ask(id: str, query: Query) -> Json:
        with showcase.asking(id) as run:
            return Json(address.ask(run, query))

    async def endpoint(request: Request) -> Response:
        query = _query(request, address.parameters)
        return await run_in_threadpool(ask, request.path_params["id"], query)

    return endpoint


def _report(path: Path) -> Response:
    """The HTML of a report, if it is a file of its folder."""
    if not path.resolve().is_relative_to(path.parent.resolve()) or not path.is_file():
        raise LookupError(f"{path} is not there any more; make the report again")
    headers = {"Content-Security-Policy": REPORT_POLICY, "Cache-Control": "no-store"}
    return Response(path.read_bytes(), media_type="text/html", headers=headers)


class _Static(StaticFiles):
    """The page's own files. One that is asked for with a version is kept for good."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        versioned = b"v=" in scope["query_string"]
        kept = "public, max-age=31536000, immutable" if versioned else "no-cache"
        response.headers["Cache-Control"] = kept
        return response


# Events


def _announced(showcase: Showcase, request: Request, closing: Closing) -> Response:
    id, headers = request.path_params["id"], {"Cache-Control": "no-store"}
    showcase.check(id)
    if request.method == "HEAD":
        return Response(media_type="text/event-stream", headers=headers)

    async def stream() -> AsyncIterator[bytes]:
        using = showcase.using(id)
        run = await run_in_threadpool(using.__enter__)
        try:
            async for event in changes(run, closing):
                yield event
        finally:
            using.__exit__(None, None, None)

    return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)


async def changes(run: ShownRun, closing: Closing) -> AsyncIterator[bytes]:
    """How a run stands, now and whenever something of it is new."""
    seen, quiet_s = -1, 0.0
    while not closing():
        count, changed = run.changes
        if count != seen:
            yield b"event: changed\ndata: " + msgspec.json.encode(changed) + b"\n\n"
            seen, quiet_s = count, 0.0
            await asyncio.sleep(GAP_S)
        elif quiet_s >= BEAT_S:
            yield b": still here\n\n"
            quiet_s = 0.0
        else:
            await asyncio.sleep(LOOK_S)
            quiet_s += LOOK_S


# What cannot be answered


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = f"there is nothing at {request.url.path[:200]!r}; /api/schema has the addresses"
    return refused(error.status_code, words)


async def _unknown(request: Request, error: Exception) -> Response:
    return refused(404, str(error.args[0]) if error.args else repr(error))


async def _wrong(request: Request, error: Exception) -> Response:
    return refused(400, str(error))


async def _out_of_reach(request: Request, error: Exception) -> Response:
    return refused(503, f"{error}; try again in a moment")


async def _not_ready(request: Request, error: Exception) -> Response:
    return refused(503, str(error))


# The schema


def make_schema() -> dict[str, Any]:
    """Every address with its parameters and answer, and the JSON Schema of all answers."""
    kinds = [Served, Changed, Refused, *(one.answer for one in ADDRESSES)]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/{name}")
    answer_of = dict(zip(kinds, schemas, strict=True))
    described = lambda kind, parameters: {"answer": answer_of[kind], "parameters": parameters}
    return {
        "addresses": {
            "/api/runs": {"answer": {"type": "array", "items": answer_of[Served]}},
            f"{RUN}/events": {"event": "changed", "data": answer_of[Changed]},
            **{f"{RUN}/{a.path}": described(a.answer, dict(a.parameters)) for a in ADDRESSES},
        },
        "refused": answer_of[Refused],
        "components": components,
    }
