"""The FastAPI door: names, outcomes as statuses, scopes, and requests that end before their time.

Every app is served by a real uvicorn, every lock is on a real server.
"""

# Without `from __future__ import annotations`: FastAPI has to see the types of inner functions.

import asyncio
import enum
import importlib
import logging
import pathlib
import re
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Annotated, Any, Literal

import fastapi
import httpx2
import pytest
from fastapi import (
    APIRouter,
    BackgroundTasks,
    Body,
    Depends,
    FastAPI,
    Header,
    HTTPException,
    Path,
    Query,
    Request,
    WebSocket,
)
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.testclient import TestClient
from pydantic import AfterValidator
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from aiodlock import Backoff, Lease, LeaseLostError, LockClient, LockTimeout
from aiodlock.fastapi import Locked, install
from aiodlock.fencing import Grant, RedisFence
from aiodlock.testing import LockServer
from tests.conftest import MakeClient
from tests.keys import leftovers
from tests.proxy import ChaosProxy
from tests.until import until
from tests.web import (
    Cancelling,
    Passing,
    Site,
    Uvicorn,
    Work,
    an_app,
    asking,
    overlaps,
    serving,
    turns_of,
)

INVOICE_42 = "aiodlock:{invoice:42}"

InvoiceLease = Annotated[Lease, Locked("invoice:{invoice_id}", ttl=1)]


# What is locked.


async def test_requests_for_other_names_run_side_by_side_and_for_one_in_turn(
    make_client: MakeClient,
) -> None:
    """The name is made from the path, so one invoice does not hold up another."""
    app, work = an_app(make_client()), Work()

    @app.get("/invoices/{invoice_id}")
    async def charge(invoice_id: int, lease: InvoiceLease) -> str:
        await work(lease.name)
        return lease.name

    async with serving(app) as site:
        requests = [site.begin(f"/invoices/{number}") for number in (1, 2, 1, 2)]
        await until(lambda: len(work.begun) == 2)
        assert sorted(work.begun) == ["invoice:1", "invoice:2"]
        work.gate.set()
        answers = [answer.json() for answer in await asyncio.gather(*requests)]
    assert answers == ["invoice:1", "invoice:2", "invoice:1", "invoice:2"]
    assert len(work.begun) == 4


class Kind(enum.StrEnum):
    daily = "daily"


def _lower(text: str) -> str:
    return text.lower()


def _invoice_of(invoice_id: int) -> int:
    return invoice_id


class Customer:
    def __init__(self, customer_id: int) -> None:
        self.customer_id = customer_id


ID = "6B1B3D4C-0000-4000-8000-00000000000A"


def _number(id: int, lease: Annotated[Lease, Locked("n:{id}")]) -> str:
    return lease.name


def _by_default(lease: Annotated[Lease, Locked("n:{id}")], id: int = Path()) -> str:
    return lease.name


def _alias(
    number: Annotated[int, Path(alias="id", ge=1)], lease: Annotated[Lease, Locked("n:{id}")]
) -> str:
    return lease.name


def _uuid(id: uuid.UUID, lease: Annotated[Lease, Locked("n:{id}")]) -> str:
    return lease.name


def _kind(id: Kind, lease: Annotated[Lease, Locked("n:{id}")]) -> str:
    return lease.name


def _validator(
    id: Annotated[str, AfterValidator(_lower)], lease: Annotated[Lease, Locked("n:{id}")]
) -> str:
    return lease.name


def _dotted(id: uuid.UUID, lease: Annotated[Lease, Locked("n:{id.version}")]) -> str:
    return lease.name


def _by_dependency(
    invoice_id: Annotated[int, Depends(_invoice_of)],
    lease: Annotated[Lease, Locked("n:{invoice_id}")],
) -> str:
    return lease.name


def _by_class(
    customer: Annotated[Customer, Depends()],
    lease: Annotated[Lease, Locked("n:{customer_id}")],
) -> str:
    return lease.name


def _undeclared(lease: Annotated[Lease, Locked("n:{id}")]) -> str:
    return lease.name


def _untyped(id, lease: Annotated[Lease, Locked("n:{id}")]) -> str:  # type: ignore[no-untyped-def] # noqa: ANN001
    return lease.name


Number = Annotated[int, Path(ge=1)]


def _as_text(id: "Number", lease: "Annotated[Lease, Locked('n:{id}')]") -> "Nowhere":  # type: ignore[name-defined] # noqa: F821
    return lease.name


def _our_words(lease: Annotated[Lease, Locked("n:{connection}:{name}")]) -> str:
    return lease.name


def _constant(id: int, lease: Annotated[Lease, Locked("nightly")]) -> str:
    return lease.name


@pytest.mark.parametrize(
    ("path", "handler", "asked", "expected"),
    [
        ("/{id}", _number, "/042", "n:42"),
        ("/{id}", _by_default, "/042", "n:42"),
        ("/{id}", _alias, "/042", "n:42"),
        ("/{id}", _uuid, f"/{ID}", f"n:{ID.lower()}"),
        ("/{id}", _kind, "/daily", "n:daily"),
        ("/{id}", _validator, "/ABC", "n:abc"),
        ("/{id}", _dotted, f"/{ID}", "n:4"),
        ("/{invoice_id}", _by_dependency, "/042", "n:42"),
        ("/{customer_id}", _by_class, "/042", "n:42"),
        ("/{id}", _undeclared, "/042", "n:042"),
        ("/{id:int}", _undeclared, "/042", "n:42"),
        ("/{id:path}", _undeclared, "/a/b%20%7B", "n:a/b {"),
        ("/{id}", _untyped, "/042", "n:042"),
        ("/{id}", _as_text, "/042", "n:42"),
        ("/{connection}/{name}", _our_words, "/a/042", "n:a:042"),
        ("/{id}", _constant, "/042", "nightly"),
    ],
)
async def test_name_is_made_from_what_the_route_reads_in_its_path(
    make_client: MakeClient, path: str, handler: Callable[..., Any], asked: str, expected: str
) -> None:
    """Two spellings of one value are one lock: else two requests would work on one invoice."""
    app = an_app(make_client())
    app.get(path, response_model=None)(handler)
    async with asking(app) as client:
        assert (await client.get(asked)).json() == expected


def _by_query(invoice: Annotated[int, Query()]) -> str:
    return f"invoice:{invoice}"


async def _by_header(idempotency_key: Annotated[str, Header()]) -> str:
    return f"payment:{idempotency_key}"


def _by_body(invoice: Annotated[dict[str, int], Body()]) -> str:
    return f"invoice:{invoice['id']}"


def _user(authorization: Annotated[str, Header()]) -> str:
    return authorization.removeprefix("Bearer ")


async def _by_user(name: Annotated[str, Depends(_user)]) -> AsyncIterator[str]:
    yield f"user:{name}"


@pytest.mark.parametrize(
    ("name_of", "request_parts", "expected"),
    [
        (_by_query, {"params": {"invoice": "042"}}, "invoice:42"),
        (_by_header, {"headers": {"Idempotency-Key": "abc"}}, "payment:abc"),
        (_by_body, {"json": {"id": 42}}, "invoice:42"),
        (_by_user, {"headers": {"Authorization": "Bearer ann"}}, "user:ann"),
        (lambda: "fixed", {}, "fixed"),
    ],
)
async def test_name_from_a_dependency_covers_the_rest_of_the_request(
    make_client: MakeClient,
    name_of: Callable[..., Any],
    request_parts: dict[str, Any],
    expected: str,
) -> None:
    """Query, header, body and user are FastAPI's to read, so the callable is a dependency."""
    app = an_app(make_client())

    @app.post("/")
    async def handler(lease: Annotated[Lease, Locked(name_of)]) -> str:
        return lease.name

    async with asking(app) as client:
        answer = await client.post("/", **request_parts)
    assert answer.json() == expected


async def test_lock_of_a_router_is_held_for_each_of_its_routes(
    make_client: MakeClient, redis: Redis
) -> None:
    """As a dependency without a value, with a field of the prefix."""
    app = an_app(make_client())
    router = APIRouter(prefix="/tenants/{tenant}", dependencies=[Locked("tenant:{tenant}")])

    @router.get("/keys")
    async def keys(tenant: str) -> list[str]:
        return await leftovers(redis)

    app.include_router(router)
    async with asking(app) as client:
        assert (await client.get("/tenants/7/keys")).json() == ["aiodlock:{tenant:7}"]


async def test_template_with_an_unknown_field_names_it_at_the_first_request(
    make_client: MakeClient, redis: Redis
) -> None:
    """Never a constant name for all requests: a query parameter is no path parameter either."""
    app = an_app(make_client())

    @app.get("/invoices/{invoice_id}")
    async def charge(
        invoice_id: int, year: int, lease: Annotated[Lease, Locked("i:{invoice_id}:{year}")]
    ) -> str:
        return lease.name

    expected = (
        "the lock's name 'i:{invoice_id}:{year}' has the field {year}, but the path parameters of "
        "this route are: invoice_id"
    )
    async with asking(app) as client:
        with pytest.raises(ValueError, match=re.escape(expected)):
            await client.get("/invoices/42?year=2026")
    assert await redis.keys() == []


@pytest.mark.parametrize(
    ("path", "where"),
    [("/invoices/x", ["path", "invoice_id"]), (f"/texts/{'x' * 600}", ["lock"])],
)
async def test_path_that_makes_no_name_is_the_clients_mistake(
    make_client: MakeClient, redis: Redis, path: str, where: list[str]
) -> None:
    """As FastAPI answers it, and before anything is locked."""
    app = an_app(make_client())

    @app.get("/invoices/{invoice_id}")
    async def charge(invoice_id: int, lease: InvoiceLease) -> str:
        return lease.name

    @app.get("/texts/{text}")
    async def read(text: str, lease: Annotated[Lease, Locked("text:{text}")]) -> str:
        return lease.name

    async with asking(app) as client:
        answer = await client.get(path)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == where
    assert await redis.keys() == []


async def test_name_that_is_no_text_is_the_programmers_mistake(make_client: MakeClient) -> None:
    """A callable that forgot to return."""
    app = an_app(make_client())

    @app.get("/")
    async def handler(lease: Annotated[Lease, Locked(lambda: None)]) -> None: ...

    async with asking(app) as client:
        with pytest.raises(TypeError, match="None"):
            await client.get("/")


@pytest.mark.parametrize(
    ("error", "arguments", "options"),
    [
        (ValueError, ["a"], {"wait_timeout": None}),
        (ValueError, ["a"], {"wait_timeout": -1}),
        (ValueError, ["a"], {"scope": "handler"}),
        (ValueError, ["a"], {"ttl": 0}),
        (ValueError, ["a"], {"on_lost": "stop"}),
        (ValueError, ["a"], {"ttl": 10, "max_hold": 5}),
        (TypeError, ["a"], {"retry": 0.1}),
        (TypeError, ["a"], {"timeout": 5}),
        (TypeError, ["a"], {"locks": "redis://localhost"}),
        (TypeError, [42], {}),
        (ValueError, [""], {}),
        (ValueError, ["a:{}"], {}),
        (ValueError, ["a:{0}"], {}),
        (ValueError, ["a:{b[0]}"], {}),
        (ValueError, ["a:{b"], {}),
    ],
)
def test_dependency_with_a_bad_argument_is_refused_where_it_is_written(
    error: type[Exception], arguments: list[Any], options: dict[str, Any]
) -> None:
    """At import, not in a request."""
    with pytest.raises(error):
        Locked(*arguments, **options)


async def test_options_of_a_lock_reach_it(make_client: MakeClient, redis: Redis) -> None:
    """All that `lock` knows; the ttl is the one that can be seen."""
    app = an_app(make_client(ttl=30))

    @app.get("/")
    async def handler(
        lease: Annotated[
            Lease,
            Locked("a", ttl=7, retry=Backoff(), on_lost="raise", max_hold=9, auto_extend=False),
        ],
    ) -> list[float]:
        return [lease.ttl, await redis.pttl("aiodlock:{a}") / 1000]

    async with asking(app) as client:
        assert (await client.get("/")).json() == [7, pytest.approx(7, abs=1)]


# What comes out.


def an_invoice_app(locks: LockClient, work: Work | None = None, **options: Any) -> FastAPI:
    """One route: charge an invoice under its lock, doing *work*."""
    app = an_app(locks, options=options)

    @app.get("/invoices/{invoice_id}")
    async def charge(
        invoice_id: int,
        lease: Annotated[Lease, Locked("invoice:{invoice_id}", wait_timeout=0.5, ttl=1)],
    ) -> str:
        if work is not None:
            await work(lease.name)
        return lease.owner_token

    return app


@pytest.mark.parametrize(
    ("options", "status", "retry_after"),
    [({}, 423, "1"), ({"timeout_status": 409, "retry_after": 7}, 409, "7")],
)
async def test_request_for_a_held_lock_gets_the_status_of_the_app_and_no_secret(
    make_client: MakeClient, options: dict[str, int], status: int, retry_after: str
) -> None:
    """423 by default; who holds, whose owner token begins with that, is nobody else's business."""
    app, other = an_invoice_app(make_client(), None, **options), make_client(label="secret")
    async with serving(app) as site:
        async with other.lock("invoice:42"):
            answer = await site.get("/invoices/42")
        assert (await site.get("/invoices/42")).status_code == 200
    assert answer.status_code == status
    assert answer.headers["Retry-After"] == retry_after
    assert answer.json() == {"detail": "Another holds this lock; try again."}


async def test_request_without_a_server_gets_503(
    make_client: MakeClient, proxy: ChaosProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """With Retry-After; and again 200 once the server is back."""
    app = an_invoice_app(make_client(proxy.url, request_timeout=0.2))
    async with serving(app) as site:
        assert (await site.get("/invoices/42")).status_code == 200
        proxy.black_hole()
        answer = await site.get("/invoices/42")
        proxy.heal(deliver=False)
        await until(partial(_is_ok, site, "/invoices/42"))
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "1"
    assert answer.json() == {"detail": "The lock server gave no answer; try again."}
    assert "'/invoices/42' answered with 503" in caplog.text


async def _is_ok(site: Site, path: str) -> bool:
    return (await site.get(path)).status_code == 200


async def test_request_that_the_server_forbids_gets_500_and_the_log_says_why(
    make_client: MakeClient, server: LockServer, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong set-up is not the client's business, nor what is missing."""
    await redis.acl_setuser("blind", enabled=True, nopass=True, commands=["+@connection"])
    app = an_invoice_app(make_client(server.url.replace("//", "//blind:x@")))
    try:
        async with serving(app) as site:
            answer = await site.get("/invoices/42")
    finally:
        await redis.acl_deluser("blind")
    assert answer.status_code == 500
    assert answer.json() == {"detail": "The lock cannot be used; the log says why."}
    assert [record.levelno for record in caplog.records if "with 500" in record.message] == [
        logging.ERROR
    ]


async def test_request_for_a_key_that_is_no_lock_gets_500(
    make_client: MakeClient, redis: Redis
) -> None:
    """Somebody else's hash stands there."""
    await redis.hset(INVOICE_42, "a", "b")
    async with serving(an_invoice_app(make_client())) as site:
        answer = await site.get("/invoices/42")
    assert answer.status_code == 500
    assert "Retry-After" not in answer.headers


async def test_request_that_loses_its_lock_is_cancelled_and_gets_409(
    make_client: MakeClient, redis: Redis
) -> None:
    """In the default scope the loss comes out before the response."""
    work = Work()
    async with serving(an_invoice_app(make_client(), work)) as site:
        request = site.begin("/invoices/42")
        await until(lambda: work.begun)
        await redis.delete(INVOICE_42)
        answer = await request
    assert answer.status_code == 409
    assert answer.json() == {"detail": "The lock was lost while the work was under way."}
    assert work.cancelled == ["invoice:42"]
    assert await leftovers(redis) == []


async def test_request_whose_fence_is_stale_gets_409(make_client: MakeClient, redis: Redis) -> None:
    """The storage knows of a newer holder: for the caller the lock was lost."""
    app = an_app(make_client())
    fence = RedisFence(redis)

    @app.get("/invoices/{invoice_id}")
    async def charge(invoice_id: int, lease: InvoiceLease) -> None:
        await fence.claim(Grant(lease.name, lease.fencing_token + 1))
        await fence.claim(lease)

    async with serving(app) as site:
        answer = await site.get("/invoices/42")
    assert answer.status_code == 409
    assert answer.json() == {"detail": "The lock was lost, and another has begun."}


@pytest.mark.parametrize("is_lost", [False, True])
async def test_handler_that_raises_gives_its_own_answer(
    make_client: MakeClient, redis: Redis, is_lost: bool
) -> None:
    """Also when its lock is lost besides: the body's own error wins."""
    app = an_app(make_client())

    @app.get("/invoices/{invoice_id}")
    async def charge(invoice_id: int, lease: InvoiceLease) -> None:
        if is_lost:
            await redis.delete(INVOICE_42)
        raise HTTPException(402, "no money")

    async with serving(app) as site:
        answer = await site.get("/invoices/42")
    assert (answer.status_code, answer.json()) == (402, {"detail": "no money"})
    assert await leftovers(redis) == []


async def test_error_of_a_lock_taken_in_the_handler_is_answered_alike(
    make_client: MakeClient,
) -> None:
    """The client is in the app's state."""
    app, other = an_app(make_client()), make_client()

    @app.get("/")
    async def handler(request: Request) -> None:
        locks: LockClient = request.app.state.aiodlock
        await locks.lock("report").acquire(wait_timeout=0)

    async with serving(app) as site, other.lock("report"):
        assert (await site.get("/")).status_code == 423


@pytest.mark.parametrize("when", ["constructor", "before", "after"])
async def test_handler_of_the_users_own_wins(
    make_client: MakeClient, when: Literal["constructor", "before", "after"]
) -> None:
    """Whenever it was registered."""

    async def own(request: Request, error: Exception) -> Response:
        assert isinstance(error, LockTimeout)
        return JSONResponse({"busy": error.name}, 429)

    app = FastAPI(exception_handlers={LockTimeout: own} if when == "constructor" else None)
    if when == "before":
        app.add_exception_handler(LockTimeout, own)
    install(app, make_client())
    if when == "after":
        app.add_exception_handler(LockTimeout, own)

    @app.get("/")
    async def handler(lease: Annotated[Lease, Locked("a", wait_timeout=0)]) -> None: ...

    async with serving(app) as site, make_client().lock("a"):
        answer = await site.get("/")
    assert (answer.status_code, answer.json()) == (429, {"busy": "a"})


# What install says no to, and whose client it is.


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (ValueError, {"timeout_status": 200}),
        (ValueError, {"timeout_status": "423"}),
        (ValueError, {"retry_after": -1}),
        (ValueError, {"retry_after": 0.5}),
        (TypeError, {"locks": "redis://localhost"}),
    ],
)
def test_install_with_a_bad_argument_is_refused(
    error: type[Exception], options: dict[str, Any]
) -> None:
    """With a word on what is allowed."""
    options = {"locks": LockClient.from_url("memory://"), **options}
    with pytest.raises(error, match=r"must be|LockClient"):
        install(FastAPI(), **options)


async def test_install_in_an_app_that_has_started_is_refused(make_client: MakeClient) -> None:
    """Its handlers would never be asked: every outcome would be a 500."""
    app, locks = FastAPI(), make_client()
    async with serving(app):
        with pytest.raises(RuntimeError, match="where you make the app"):
            install(app, locks)


async def test_install_twice_takes_the_second_client_and_status(make_client: MakeClient) -> None:
    """As a test does that replaces what the app's own module installed."""
    app = an_invoice_app(make_client(prefix="first:"))
    second = make_client()
    install(app, second, timeout_status=409)
    async with serving(app) as site, make_client().lock("invoice:42"):
        assert (await site.get("/invoices/42")).status_code == 409
    await second.aclose()


async def test_app_without_install_says_what_to_call(caplog: pytest.LogCaptureFixture) -> None:
    """Rather than an AttributeError."""
    app = FastAPI()

    @app.get("/")
    async def handler(lease: Annotated[Lease, Locked("a")]) -> None: ...

    async with serving(app) as site:
        assert (await site.get("/")).status_code == 500
    assert "RuntimeError: call aiodlock.fastapi.install(app, locks) for this app" in caplog.text


async def test_apps_that_share_a_router_have_each_their_own_client(
    make_client: MakeClient,
) -> None:
    """A mounted app is one of them: it is asked for its own."""
    outer, inner = an_app(make_client(label="outer")), an_app(make_client(label="inner"))
    router = APIRouter()

    @router.get("/who")
    async def who(lease: Annotated[Lease, Locked("a")]) -> str:
        return lease.owner_token.partition(":")[0]

    for app in (inner, outer):
        app.include_router(router)
    outer.mount("/inner", inner)
    async with serving(outer) as site:
        answers = [(await site.get(path)).json() for path in ("/who", "/inner/who")]
    await inner.state.aiodlock.aclose()  # a mounted app's lifespan is not run
    assert answers == ["outer", "inner"]


async def test_dependency_may_take_another_client(make_client: MakeClient, redis: Redis) -> None:
    """For locks that live on another server."""
    app, other = an_app(make_client()), make_client(prefix="other:")

    @app.get("/")
    async def handler(
        here: Annotated[Lease, Locked("a")], there: Annotated[Lease, Locked("a", locks=other)]
    ) -> list[str]:
        return await leftovers(redis, "")

    async with serving(app) as site:
        assert (await site.get("/")).json() == ["aiodlock:{a}", "other:{a}"]
    await other.aclose()


def test_fastapi_without_scopes_is_refused_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 0.121 the lock would be held until after the response, whatever was asked."""

    def depends(dependency: object = None, *, use_cache: bool = True) -> None: ...

    monkeypatch.setattr(fastapi, "Depends", depends)
    monkeypatch.setattr(fastapi, "__version__", "0.120.4")
    monkeypatch.delitem(sys.modules, "aiodlock.fastapi")
    with pytest.raises(ImportError, match=r"FastAPI 0\.121 or newer.*0\.120\.4"):
        importlib.import_module("aiodlock.fastapi")


# Several locks in one request.


async def test_handler_with_two_locks_holds_both_and_gives_back_the_first_if_the_second_is_held(
    make_client: MakeClient, redis: Redis
) -> None:
    """In the order of the parameters."""
    app = an_app(make_client())

    @app.get("/{source}/{target}")
    async def transfer(
        source: int,
        target: int,
        first: Annotated[Lease, Locked("account:{source}", wait_timeout=0.5)],
        second: Annotated[Lease, Locked("account:{target}", wait_timeout=0.5)],
    ) -> list[str]:
        return await leftovers(redis)

    async with serving(app) as site:
        both = (await site.get("/1/2")).json()
        assert await leftovers(redis) == []
        async with make_client().lock("account:2"):
            assert (await site.get("/1/2")).status_code == 423
            assert await leftovers(redis) == ["aiodlock:{account:2}"]
    assert both == ["aiodlock:{account:1}", "aiodlock:{account:2}"]


async def test_equal_dependencies_of_one_request_share_one_lease(make_client: MakeClient) -> None:
    """Else a handler and its own dependency would wait for each other."""
    app = an_app(make_client())

    def inner(lease: Annotated[Lease, Locked("a:{id}", ttl=3)]) -> int:
        return lease.fencing_token

    @app.get("/{id}")
    async def handler(
        id: int,
        token: Annotated[int, Depends(inner)],
        lease: Annotated[Lease, Locked("a:{id}", ttl=3)],
    ) -> bool:
        return token == lease.fencing_token

    async with serving(app) as site:
        assert (await site.get("/1")).json() is True


# The two scopes.

FREE_AFTER_HANDLER = ["handler: held", "chunk: free", "chunk: free", "background: free"]
HELD_TO_THE_END = ["handler: held", "chunk: held", "chunk: held", "background: held"]


def a_streaming_app(
    locks: LockClient, redis: Redis, scope: Literal["function", "request"]
) -> tuple[FastAPI, list[str]]:
    """An app that writes down, at each of its steps, whether the lock is held."""
    app, seen = an_app(locks), list[str]()

    async def note(step: str) -> None:
        held = await redis.exists(INVOICE_42)
        seen.append(f"{step}: {'held' if held else 'free'}")

    async def chunks() -> AsyncIterator[str]:
        for _ in range(2):
            await note("chunk")
            yield "x"

    @app.get("/{invoice_id}/{kind}")
    async def export(
        invoice_id: int,
        kind: str,
        background: BackgroundTasks,
        lease: Annotated[Lease, Locked("invoice:{invoice_id}", scope=scope)],
    ) -> Any:
        await note("handler")
        background.add_task(note, "background")
        return StreamingResponse(chunks()) if kind == "stream" else None

    return app, seen


@pytest.mark.parametrize("kind", ["stream", "plain"])
@pytest.mark.parametrize(
    ("scope", "expected"), [("function", FREE_AFTER_HANDLER), ("request", HELD_TO_THE_END)]
)
async def test_lock_is_released_where_its_scope_says(
    make_client: MakeClient,
    redis: Redis,
    scope: Literal["function", "request"],
    expected: list[str],
    kind: str,
) -> None:
    """Function: before the response. Request: after the body and the background tasks."""
    app, seen = a_streaming_app(make_client(), redis, scope)
    async with serving(app) as site:
        assert (await site.get(f"/42/{kind}")).status_code == 200
        await until(lambda: len(seen) == len(expected) - 2 * (kind == "plain"))
        await until(partial(_is_free, redis))
    assert seen == [step for step in expected if kind == "stream" or "chunk" not in step]


async def _is_free(redis: Redis) -> bool:
    return await leftovers(redis) == []


def an_endless_app(locks: LockClient, *, is_wrapped: bool) -> tuple[FastAPI, list[Lease]]:
    """One route that streams for ever under a lock, and shows the leases that it had."""
    app, leases = an_app(locks), list[Lease]()
    if is_wrapped:
        app.add_middleware(Passing)

    async def chunks() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 4096
            await asyncio.sleep(0.005)

    @app.get("/{invoice_id}")
    async def export(
        invoice_id: int,
        lease: Annotated[Lease, Locked("invoice:{invoice_id}", scope="request", ttl=1)],
    ) -> Any:
        leases.append(lease)
        return StreamingResponse(chunks())

    return app, leases


@pytest.mark.parametrize("is_wrapped", [False, True])
async def test_client_that_hangs_up_in_a_stream_frees_the_lock_within_a_second(
    make_client: MakeClient, redis: Redis, is_wrapped: bool
) -> None:
    """The stream is ended by the server, and the lock with it, ttl or not."""
    app, leases = an_endless_app(make_client(), is_wrapped=is_wrapped)
    async with serving(app) as site:
        async with site.client.stream("GET", "/42") as response:
            chunks = response.aiter_raw()
            await anext(chunks)
            assert await redis.exists(INVOICE_42)
        hung_up = time.monotonic()
        await until(partial(_is_free, redis))
        assert time.monotonic() - hung_up < 1
        assert (await _first_status(site, "/42")) == 200
    assert [lease.state for lease in leases] == ["released", "released"]


async def _first_status(site: Site, path: str) -> int:
    async with site.client.stream("GET", path) as response:
        return response.status_code


async def test_lock_lost_in_a_stream_breaks_the_body_off(
    make_client: MakeClient, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """The status has been sent: the client sees a body without an end, the log the loss."""
    app, leases = an_endless_app(make_client(), is_wrapped=False)
    async with serving(app) as site, site.client.stream("GET", "/42") as response:
        assert response.status_code == 200
        with pytest.raises(httpx2.RemoteProtocolError, match="incomplete"):
            async for _ in response.aiter_raw():
                await redis.delete(INVOICE_42)
    assert [lease.state for lease in leases] == ["lost"]
    assert "aiodlock._errors.LeaseLostError" in caplog.text


async def test_lock_lost_in_a_stream_behind_base_http_middleware_looks_like_an_end(
    make_client: MakeClient, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Starlette ends the body as if it were whole: documented, for only an end mark tells."""
    app, leases = an_endless_app(make_client(), is_wrapped=True)
    async with serving(app) as site, site.client.stream("GET", "/42") as response:
        async for _ in response.aiter_raw():
            await redis.delete(INVOICE_42)
    assert [lease.state for lease in leases] == ["lost"]
    assert "aiodlock._errors.LeaseLostError" in caplog.text


@pytest.mark.parametrize("where", ["handler", "background"])
async def test_lock_of_request_scope_lost_outside_the_body_is_a_409_or_in_the_log(
    make_client: MakeClient, redis: Redis, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """In the handler there is still time for a status; in a background task there is not."""
    app, work = an_app(make_client()), Work()

    @app.get("/{invoice_id}")
    async def handler(
        invoice_id: int,
        background: BackgroundTasks,
        lease: Annotated[Lease, Locked("invoice:{invoice_id}", scope="request", ttl=1)],
    ) -> None:
        background.add_task(work, "background")
        if where == "handler":
            await work("handler")

    async with serving(app) as site:
        request = site.begin("/42")
        await until(lambda: work.begun)
        await redis.delete(INVOICE_42)
        assert (await request).status_code == (409 if where == "handler" else 200)
        await until(lambda: work.cancelled)
        await until(lambda: "LeaseLostError" in caplog.text or where == "handler")
    assert work.cancelled == work.begun == [where]


# Requests that end before their time.


async def test_client_that_hangs_up_in_a_handler_leaves_it_to_finish_under_the_lock(
    make_client: MakeClient, redis: Redis
) -> None:
    """FastAPI cancels no handler for that, so the lock stays for as long as it runs."""
    work = Work()
    async with serving(an_invoice_app(make_client(), work)) as site:
        request = site.begin("/invoices/42")
        await until(lambda: work.begun)
        request.cancel()
        await asyncio.wait([request])
        assert await redis.exists(INVOICE_42)
        work.gate.set()
        await until(partial(_is_free, redis))
    assert work.cancelled == []


async def test_client_that_hangs_up_in_the_queue_leaves_its_request_to_its_turn(
    make_client: MakeClient, redis: Redis
) -> None:
    """Documented, as a reason for a short wait_timeout: nobody tells the request."""
    app, work = an_app(make_client()), Work()

    @app.get("/{invoice_id}")
    async def charge(invoice_id: int, lease: InvoiceLease) -> None:
        await work(lease.name)

    async with serving(app) as site:
        async with make_client().lock("invoice:42"):
            request = site.begin("/42")
            await until(partial(redis.exists, f"{INVOICE_42}:queue"))
            request.cancel()
            await asyncio.wait([request])
        await until(lambda: work.begun)
        work.gate.set()
        await until(partial(_is_free, redis))


@pytest.mark.parametrize("how", ["native", "anyio"])
async def test_request_cancelled_while_it_waits_leaves_the_queue(
    make_client: MakeClient, redis: Redis, how: str
) -> None:
    """What holds the lock is not touched, and nothing of the waiter is left."""
    app, give_up = an_app(make_client()), asyncio.Event()
    app.add_middleware(Cancelling, give_up=give_up, how=how)

    @app.get("/{invoice_id}")
    async def charge(invoice_id: int, lease: InvoiceLease) -> None: ...

    async with serving(app) as site, make_client().lock("invoice:42") as held:
        request = site.begin("/42")
        await until(partial(redis.exists, f"{INVOICE_42}:queue"))
        give_up.set()
        assert (await request).status_code == 504
        assert await leftovers(redis) == [INVOICE_42]
        assert held.is_held


@pytest.mark.parametrize("how", ["native", "anyio"])
async def test_request_cancelled_while_it_holds_releases(
    make_client: MakeClient, redis: Redis, how: str
) -> None:
    """As any other end of the handler."""
    app, give_up, work = an_app(make_client()), asyncio.Event(), Work()
    app.add_middleware(Cancelling, give_up=give_up, how=how)

    @app.get("/{invoice_id}")
    async def charge(invoice_id: int, lease: InvoiceLease) -> None:
        await work(lease.name)

    async with serving(app) as site:
        request = site.begin("/42")
        await until(lambda: work.begun)
        give_up.set()
        assert (await request).status_code == 504
        assert await leftovers(redis) == []
    assert work.cancelled == ["invoice:42"]


@pytest.mark.parametrize("is_lost", [False, True])
async def test_handler_behind_base_http_middleware_gives_the_same_statuses(
    make_client: MakeClient, redis: Redis, is_lost: bool
) -> None:
    """200, 423 and 409."""
    work = Work()
    app = an_invoice_app(make_client(), work)
    app.add_middleware(Passing)
    async with serving(app) as site:
        request = site.begin("/invoices/42")
        await until(lambda: work.begun)
        assert (await site.get("/invoices/42")).status_code == 423
        if is_lost:
            await redis.delete(INVOICE_42)
        else:
            work.gate.set()
        assert (await request).status_code == (409 if is_lost else 200)
        assert await leftovers(redis) == []


async def test_app_that_is_shut_down_lets_requests_finish_first(
    make_client: MakeClient, redis: Redis
) -> None:
    """The one that works and the one that waits behind it; only then is the client closed."""
    app, work = an_app(make_client()), Work()

    @app.get("/{invoice_id}")
    async def charge(invoice_id: int, lease: InvoiceLease) -> None:
        await work(lease.name)

    async with serving(app) as site:
        requests = [site.begin("/42"), site.begin("/42")]
        await until(partial(redis.exists, f"{INVOICE_42}:queue"))
        site.uvicorn.should_exit = True
        await asyncio.sleep(0)
        work.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*requests)] == [200, 200]
    assert await leftovers(redis) == []


async def test_app_that_is_shut_down_without_patience_leaves_nothing_on_the_server(
    make_client: MakeClient, redis: Redis
) -> None:
    """The server cancels what is in flight: the holder releases, the waiter leaves the queue."""
    app, work = an_app(make_client()), Work()

    @app.get("/{invoice_id}")
    async def charge(invoice_id: int, lease: InvoiceLease) -> None:
        await work(lease.name)

    async with serving(app, timeout_graceful_shutdown=0) as site:
        requests = [site.begin("/42"), site.begin("/42")]
        await until(partial(redis.exists, f"{INVOICE_42}:queue"))
        site.uvicorn.should_exit = True
        answers = await asyncio.gather(*requests, return_exceptions=True)
    assert all(isinstance(a, httpx2.HTTPError) or a.status_code == 500 for a in answers)  # type: ignore[union-attr]
    assert await leftovers(redis) == []


async def test_client_closed_under_a_request_ends_it_with_409(
    make_client: MakeClient, redis: Redis
) -> None:
    """The lease is lost (CLOSED), and given back."""
    work, locks = Work(), make_client()
    async with serving(an_invoice_app(locks, work)) as site:
        request = site.begin("/invoices/42")
        await until(lambda: work.begun)
        await locks.aclose()
        assert (await request).status_code == 409
    assert await leftovers(redis) == []


# Handlers that are not async.


async def test_sync_handler_holds_the_lock_while_its_thread_runs(
    make_client: MakeClient, redis: Redis
) -> None:
    """The lease is extended by the loop meanwhile."""
    app = an_app(make_client())

    @app.get("/{invoice_id}")
    def charge(invoice_id: int, lease: InvoiceLease, server_url: str) -> bool:
        time.sleep(1.2)  # longer than the ttl
        lease.check()
        with BlockingRedis.from_url(server_url) as own:
            return bool(own.exists(INVOICE_42))

    url = redis.connection_pool.connection_kwargs
    async with serving(app) as site:
        answer = await site.get(
            "/42", params={"server_url": f"redis://{url['host']}:{url['port']}"}
        )
        assert answer.json() is True
        assert await leftovers(redis) == []


async def test_sync_handler_whose_lock_is_lost_runs_to_its_end_and_gets_409(
    make_client: MakeClient, redis: Redis
) -> None:
    """A thread cannot be cancelled, so its request, with what it uses, does not end before it."""
    app, seen, leases, let_go = an_app(make_client()), list[str](), list[Lease](), asyncio.Event()

    def session() -> Iterator[str]:
        try:
            yield "session"
        finally:
            seen.append("session closed")

    @app.get("/{invoice_id}")
    def charge(invoice_id: int, lease: InvoiceLease, own: Annotated[str, Depends(session)]) -> None:
        leases.append(lease)
        seen.append("begun")
        while not let_go.is_set():
            time.sleep(0.005)
        with pytest.raises(LeaseLostError):
            lease.check()
        seen.append("ended")

    async with serving(app) as site:
        request = site.begin("/42")
        await until(lambda: seen)
        await redis.delete(INVOICE_42)
        await until(lambda: leases[0].state == "lost")
        assert not request.done()
        let_go.set()
        assert (await request).status_code == 409
    assert seen == ["begun", "ended", "session closed"]


# In tests, and WebSockets.


@pytest.mark.parametrize("url", ["memory://", "server"])
def test_test_client_entered_twice_opens_the_lock_client_in_each_loop(
    server: LockServer, url: str
) -> None:
    """Each block runs the lifespan, in a loop of its own."""
    app = an_invoice_app(LockClient.from_url(server.url if url == "server" else url))
    for _ in range(2):
        with TestClient(app) as client:
            assert client.get("/invoices/42").status_code == 200
            assert client.get("/invoices/42").status_code == 200


@pytest.fixture
def websocket_app(server: LockServer) -> FastAPI:
    """Names its lock, and holds it until the other side has gone."""
    app = an_app(LockClient.from_url(server.url))

    @app.websocket("/rooms/{room}")
    async def enter(
        websocket: WebSocket,
        room: int,
        lease: Annotated[Lease, Locked("room:{room}", wait_timeout=0.5, ttl=1)],
    ) -> None:
        await websocket.accept()
        await websocket.send_text(lease.name)
        with suppress(WebSocketDisconnect):
            await websocket.receive_text()

    return app


def test_websocket_holds_its_lock_until_it_is_closed(
    websocket_app: FastAPI, server: LockServer
) -> None:
    """A second one is denied with the status meanwhile, and let in afterwards."""
    with TestClient(websocket_app) as client, BlockingRedis.from_url(server.url) as redis:
        with client.websocket_connect("/rooms/07") as first:
            assert first.receive_text() == "room:7"
            with pytest.raises(WebSocketDisconnect) as denied, client.websocket_connect("/rooms/7"):
                raise AssertionError("let in")
            assert getattr(denied.value, "status_code", None) == 423
            assert redis.exists("aiodlock:{room:7}")
        with client.websocket_connect("/rooms/7") as second:
            assert second.receive_text() == "room:7"


def test_websocket_on_a_server_that_cannot_deny_is_closed_with_1013(
    websocket_app: FastAPI, server: LockServer
) -> None:
    """Which most servers turn into a 403: the status is an extension of ASGI."""

    async def bare(scope: Scope, receive: Receive, send: Send) -> None:
        scope.pop("extensions", None)
        await websocket_app(scope, receive, send)

    with (
        TestClient(bare) as client,
        client.websocket_connect("/rooms/7") as first,
        pytest.raises(WebSocketDisconnect) as closed,
    ):
        assert first.receive_text() == "room:7"
        with client.websocket_connect("/rooms/7"):
            raise AssertionError("let in")
    assert closed.value.code == 1013


def test_websocket_whose_lock_is_lost_is_closed_with_1011(
    websocket_app: FastAPI, server: LockServer
) -> None:
    """There is no status any more once it was accepted."""
    with (
        TestClient(websocket_app) as client,
        BlockingRedis.from_url(server.url) as redis,
        client.websocket_connect("/rooms/7") as websocket,
    ):
        assert websocket.receive_text() == "room:7"
        redis.delete("aiodlock:{room:7}")
        with pytest.raises(WebSocketDisconnect) as closed:
            websocket.receive_text()
    assert closed.value.code == 1011


def test_websocket_with_a_path_that_makes_no_name_is_closed_with_1008(
    websocket_app: FastAPI,
) -> None:
    """As FastAPI does it."""
    with (
        TestClient(websocket_app) as client,
        pytest.raises(WebSocketDisconnect) as closed,
        client.websocket_connect("/rooms/x"),
    ):
        raise AssertionError("let in")
    assert closed.value.code == 1008


# Two processes.


async def test_two_processes_of_one_app_never_work_on_one_invoice_though_one_is_killed(
    server: LockServer, tmp_path: pathlib.Path
) -> None:
    """Under load; who waits gets a 200, who does not a 423, from the one that lives on."""
    journal, stop = tmp_path / "journal", asyncio.Event()
    both = doomed, other = Uvicorn(server, journal), Uvicorn(server, journal)

    async def load(site: Uvicorn, path: str) -> None:
        while not stop.is_set() and await site.post(path):
            pass

    async with AsyncExitStack() as stack:
        await asyncio.gather(*(stack.enter_async_context(site) for site in both))
        for _ in range(10):  # The negative control: without a lock they overlap, and it is seen.
            await asyncio.gather(doomed.post("/unlocked/0"), other.post("/unlocked/0"))
        assert overlaps(turns_of(journal))
        journal.write_text("")
        async with asyncio.TaskGroup() as group:
            for site in both:
                for path in (*("/wait/1", "/wait/2") * 3, "/try/1", "/try/2"):
                    group.create_task(load(site, path))
            group.create_task(doomed.post("/wait/3?work_s=60"))
            await until(lambda: "begin 3" in journal.read_text(), 30)
            group.create_task(load(other, "/wait/3"))  # So one lock is held at the death for sure.
            await until(lambda: min(site.statuses["wait", 200] for site in both) > 60, 30)
            await doomed.kill()
            before = other.statuses["wait", 200]
            await until(lambda: other.statuses["wait", 200] > before + 60, 30)
            await until(lambda: journal.read_text().count("end 3") > 1, 30)
            stop.set()
        turns = turns_of(journal, doomed)
    assert overlaps(turns) == []
    after = {turn.invoice for turn in turns if turn.begin_ns > (doomed.killed_ns or 0)}
    assert after == {"1", "2", "3"}
    for site in both:
        assert site.statuses["try", 423]
        assert site.statuses.keys() <= OUTCOMES


OUTCOMES = {("unlocked", 200), ("wait", 200), ("try", 200), ("try", 423)}
