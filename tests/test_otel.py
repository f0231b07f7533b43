"""Spans and metrics of locks, as the SDK of OpenTelemetry exports them."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, Tracer

from aiodlock import LeaseLostError, LockClient, LockTimeout, ServerUnreachable
from aiodlock.otel import OtelObserver
from tests.conftest import MakeClient
from tests.proxy import ChaosProxy
from tests.until import forever, until

URL = "memory://"


class Telemetry:
    """What was exported; both providers are of this test alone."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])
        self.tracer: Tracer = self.tracers.get_tracer("test")

    def observer(self, **options: Any) -> OtelObserver:
        return OtelObserver(tracer_provider=self.tracers, meter_provider=self.meters, **options)

    def spans(self, name: str) -> list[ReadableSpan]:
        """The ended ones of that name."""
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    @property
    def wait(self) -> ReadableSpan:
        """The only span of a wait."""
        (span,) = self.spans("aiodlock.lock.wait")
        return span

    @property
    def hold(self) -> ReadableSpan:
        """The only span of a lease."""
        (span,) = self.spans("aiodlock.lock.hold")
        return span

    def points(self, name: str) -> list[Any]:
        """The points of a metric, one for each set of attributes."""
        data = self.reader.get_metrics_data()
        if data is None:
            return []
        return [
            point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]

    def counted(self, name: str, attribute: str) -> dict[str, int]:
        """How much was counted, by one attribute."""
        return {str(p.attributes[attribute]): int(p.value) for p in self.points(name)}


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    """The SDK, with exporters in this process."""
    telemetry = Telemetry()
    yield telemetry
    telemetry.tracers.shutdown()
    telemetry.meters.shutdown()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """Of a span, as a dict."""
    return dict(span.attributes or {})


async def test_spans_of_a_lock_are_children_of_the_callers_span(telemetry: Telemetry) -> None:
    """Both; the second is linked to the first; the body's spans are the caller's, too."""
    async with LockClient.from_url(URL, label="us", observer=telemetry.observer()) as locks:
        with telemetry.tracer.start_as_current_span("request") as request:
            async with locks.lock("invoice:42") as lease:
                with telemetry.tracer.start_as_current_span("body"):
                    assert telemetry.spans("aiodlock.lock.hold") == []
    caller = request.get_span_context()
    (body,) = telemetry.spans("body")
    for span in (telemetry.wait, telemetry.hold, body):
        assert span.parent is not None
        assert span.parent.span_id == caller.span_id
    assert [link.context for link in telemetry.hold.links] == [telemetry.wait.context]
    holder = lease.holder
    assert attributes(telemetry.wait) == {
        "aiodlock.lock.name": "invoice:42",
        "aiodlock.lock.kind": "lock",
        "aiodlock.lock.holder": holder,
        "aiodlock.lock.outcome": "acquired",
    }
    assert attributes(telemetry.hold) == {
        "aiodlock.lock.name": "invoice:42",
        "aiodlock.lock.kind": "lock",
        "aiodlock.lock.holder": holder,
        "aiodlock.lock.fencing_token": lease.fencing_token,
        "aiodlock.lock.outcome": "released",
    }
    assert telemetry.wait.status.status_code is StatusCode.UNSET
    assert telemetry.hold.status.status_code is StatusCode.UNSET


async def test_spans_of_a_wait_in_a_task_are_children_of_what_was_current_there(
    telemetry: Telemetry,
) -> None:
    """Each task has its own; the hand-over from another one changes nothing."""
    async with LockClient.from_url(URL, observer=telemetry.observer()) as locks:
        first = await locks.lock("x").acquire()

        async def wait() -> None:
            with telemetry.tracer.start_as_current_span("waiter"):
                async with locks.lock("x"):
                    pass

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0.03)
        await first.release()
        await waiting
    (waiter,) = telemetry.spans("waiter")
    waits, holds = (telemetry.spans(f"aiodlock.lock.{what}") for what in ("wait", "hold"))
    parents = [span.parent.span_id if span.parent else None for span in (*waits, *holds)]
    assert parents == [None, waiter.context.span_id, None, waiter.context.span_id]


async def test_span_of_a_lost_lease_ends_at_the_loss_with_an_error(telemetry: Telemetry) -> None:
    """And says why."""
    async with LockClient.from_url(URL, observer=telemetry.observer()) as locks:
        lease = await locks.lock("x", ttl=0.1, auto_extend=False).acquire()
        await lease.wait_lost()
        assert telemetry.hold.status.status_code is StatusCode.ERROR
        assert "its time was over" in str(telemetry.hold.status.description)
        assert attributes(telemetry.hold)["aiodlock.lock.outcome"] == "lost"
        assert attributes(telemetry.hold)["aiodlock.lock.lost_reason"] == "expired"
        await lease.release()
    assert len(telemetry.spans("aiodlock.lock.hold")) == 1
    assert telemetry.counted("aiodlock.lock.lost", "aiodlock.lock.lost_reason") == {"expired": 1}


async def test_span_of_a_lease_at_risk_says_when(
    telemetry: Telemetry, make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """An event in the span; the counter of extensions has both outcomes."""
    async with make_client(proxy.url, observer=telemetry.observer()).lock("x", ttl=1):
        proxy.black_hole()
        await until(lambda: "at_risk" in extended(telemetry))
        proxy.heal()
        await until(lambda: "extended" in extended(telemetry))
    assert [event.name for event in telemetry.hold.events] == ["at risk"]
    assert extended(telemetry)["at_risk"] == 1


def extended(telemetry: Telemetry) -> dict[str, int]:
    """How many extensions were counted, by their outcome."""
    return telemetry.counted("aiodlock.lock.extensions", "aiodlock.lock.outcome")


async def test_span_of_who_did_not_get_it_is_an_error_only_where_there_is_trouble(
    telemetry: Telemetry, make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """That another holds the lock is none; that the server is away is one."""
    locks = make_client(proxy.url, observer=telemetry.observer(), request_timeout=0.1)
    async with make_client().lock("x"):
        with pytest.raises(LockTimeout):
            await locks.lock("x").acquire(wait_timeout=0.05)
        waiting = asyncio.create_task(locks.lock("x").acquire())
        await asyncio.sleep(0.02)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        proxy.black_hole()
        with pytest.raises(ServerUnreachable):
            await locks.lock("x").acquire(wait_timeout=0.2)
    spans = telemetry.spans("aiodlock.lock.wait")
    assert [
        (attributes(span)["aiodlock.lock.outcome"], span.status.status_code) for span in spans
    ] == [
        ("timeout", StatusCode.UNSET),
        ("cancelled", StatusCode.UNSET),
        ("unreachable", StatusCode.ERROR),
    ]
    assert attributes(spans[-1])["error.type"] == "ServerUnreachable"
    assert telemetry.counted("aiodlock.lock.acquisitions", "aiodlock.lock.outcome") == {
        "timeout": 1,
        "cancelled": 1,
        "unreachable": 1,
    }


async def test_metrics_of_many_names_are_as_few_as_of_one(telemetry: Telemetry) -> None:
    """No name is a label, unless one was made of it."""
    async with LockClient.from_url(URL, observer=telemetry.observer()) as locks:
        for number in range(5):
            async with locks.lock(f"customer:{number}") as lease:
                await lease.extend()
    kind, outcome = "aiodlock.lock.kind", "aiodlock.lock.outcome"
    for name in ("wait.duration", "hold.duration", "acquisitions", "extensions"):
        (point,) = telemetry.points(f"aiodlock.lock.{name}")
        assert set(point.attributes) == {kind, outcome}
        assert getattr(point, "count", None) == 5 or point.value == 5


async def test_metrics_with_a_name_attribute_carry_what_it_makes_of_names(
    telemetry: Telemetry,
) -> None:
    """A template, for example; spans have the whole name all the same."""
    observer = telemetry.observer(name_attribute=lambda name: name.partition(":")[0])
    async with LockClient.from_url(URL, observer=observer) as locks:
        for name in ("customer:1", "customer:2", "invoice:1"):
            async with locks.lock(name):
                pass
    counted = telemetry.counted("aiodlock.lock.acquisitions", "aiodlock.lock.name")
    assert counted == {"customer": 2, "invoice": 1}
    names = {
        attributes(span)["aiodlock.lock.name"] for span in telemetry.spans("aiodlock.lock.hold")
    }
    assert names == {"customer:1", "customer:2", "invoice:1"}


async def test_histograms_of_seconds_tell_milliseconds_apart(telemetry: Telemetry) -> None:
    """The SDK's own boundaries would put all below 5 s into one bucket."""
    async with LockClient.from_url(URL, observer=telemetry.observer()) as locks:
        first = await locks.lock("x").acquire()
        waiting = asyncio.create_task(locks.lock("x").acquire())
        await asyncio.sleep(0.06)
        await first.release()
        await (await waiting).release()
    for name in ("wait", "hold"):
        (point,) = telemetry.points(f"aiodlock.lock.{name}.duration")
        assert point.explicit_bounds[:2] == (0.0005, 0.001)
        assert sum(1 for count in point.bucket_counts if count) >= 2
        assert point.max >= 0.05


async def test_observer_whose_name_attribute_fails_breaks_no_lock(telemetry: Telemetry) -> None:
    """Spans end all the same."""

    def broken(name: str) -> str:
        raise ZeroDivisionError(name)

    observer = telemetry.observer(name_attribute=broken)
    async with LockClient.from_url(URL, observer=observer) as locks, locks.lock("x"):
        pass
    assert len(telemetry.spans("aiodlock.lock.hold")) == 1


async def test_observer_of_a_closed_client_keeps_no_span(telemetry: Telemetry) -> None:
    """Neither of those who held, nor of those who waited."""
    observer = telemetry.observer()
    async with LockClient.from_url(URL, observer=observer) as locks:

        async def body() -> None:
            async with locks.lock("x"):
                await forever()

        working = [asyncio.create_task(body()) for _ in range(2)]
        await until(lambda: len(observer._holds) == len(observer._waits) == 1)
    results = await asyncio.gather(*working, return_exceptions=True)
    assert {type(result) for result in results} == {LeaseLostError, RuntimeError}
    assert (observer._waits, observer._holds) == ({}, {})


@pytest.mark.parametrize("name_attribute", ["name", 1])
def test_observer_with_a_name_attribute_that_is_no_function_is_refused(
    name_attribute: Any,
) -> None:
    """Early."""
    with pytest.raises(TypeError, match="name_attribute must be a function"):
        OtelObserver(name_attribute=name_attribute)


async def test_observer_without_an_sdk_does_nothing() -> None:
    """The API alone is enough to run."""
    async with LockClient.from_url(URL, observer=OtelObserver()) as locks, locks.lock("x"):
        pass


def test_module_without_opentelemetry_says_what_to_install() -> None:
    """And nothing else of aiodlock imports it."""
    code = """
import sys
sys.modules["opentelemetry"] = None
import aiodlock
try:
    import aiodlock.otel
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "aiodlock.otel needs OpenTelemetry: pip install 'aiodlock[otel]'\n"
