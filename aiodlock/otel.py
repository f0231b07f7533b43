"""Locks in OpenTelemetry: an observer that makes spans and metrics."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any, Final

try:
    from opentelemetry import metrics, trace
except ModuleNotFoundError:
    raise ImportError("aiodlock.otel needs OpenTelemetry: pip install 'aiodlock[otel]'") from None
from opentelemetry.metrics import Histogram, Meter, MeterProvider
from opentelemetry.trace import Span, StatusCode, TracerProvider

from ._observer import LockEvent, LostEvent, NotAcquiredEvent, Observer

__all__ = ["OtelObserver"]

_SCOPE: Final = "aiodlock"

# Seconds: from a round trip in the same rack to a job of an hour. (An SDK's own are milliseconds.)
_BOUNDARIES_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0),
)

_NAME: Final = "aiodlock.lock.name"
_KIND: Final = "aiodlock.lock.kind"
_OUTCOME: Final = "aiodlock.lock.outcome"
_REASON: Final = "aiodlock.lock.lost_reason"


class OtelObserver(Observer):
    """Spans `aiodlock.lock.wait` and `aiodlock.lock.hold`, and metrics, of every lock of a client.

    Both spans are children of the span that is current where the lock is acquired, and the second
    is linked to the first. Neither becomes the current one: what runs under the lock stays a child
    of yours. They carry the lock's name; metrics do not, for each name would be a time series.

    Args:
        tracer_provider: Default: the global one, whichever it will be.
        meter_provider: Default: the global one, whichever it will be.
        name_attribute: Makes of a lock's name what metrics carry as `aiodlock.lock.name`; it must
            have few values, as a template has. Default: metrics carry no name.

    Raises:
        TypeError: name_attribute is not a function.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        name_attribute: Callable[[str], str] | None = None,
    ) -> None:
        if name_attribute is not None and not callable(name_attribute):
            raise TypeError(
                f"name_attribute must be a function of a lock's name; got {name_attribute!r}"
            )
        self._name_attribute = name_attribute
        version = importlib.metadata.version("aiodlock")
        self._tracer = trace.get_tracer(_SCOPE, version, tracer_provider)
        self._make_instruments(metrics.get_meter(_SCOPE, version, meter_provider))
        # By acquisition. Bound: those that wait or hold, and those whose loop was never closed.
        self._waits: dict[int, Span] = {}
        self._holds: dict[int, Span] = {}

    def _make_instruments(self, meter: Meter) -> None:
        self._wait = _seconds(
            meter, "aiodlock.lock.wait.duration", "How long acquiring took, by its outcome."
        )
        self._hold = _seconds(
            meter, "aiodlock.lock.hold.duration", "How long a lease lasted, by its end."
        )
        self._acquisitions = meter.create_counter(
            "aiodlock.lock.acquisitions", "{acquisition}", "Acquisitions, by their outcome."
        )
        self._extensions = meter.create_counter(
            "aiodlock.lock.extensions",
            "{extension}",
            'Extensions; "at_risk": the first of several that failed.',
        )
        self._losses = meter.create_counter(
            "aiodlock.lock.lost", "{lease}", "Leases that were lost, by the reason."
        )

    # Spans first, in each: what a user's name_attribute raises must leave none of them open.

    def waiting(self, event: LockEvent) -> None:
        self._waits[event.acquisition] = self._tracer.start_span(
            "aiodlock.lock.wait", attributes=_described(event)
        )

    def acquired(self, event: LockEvent) -> None:
        wait = self._waits.pop(event.acquisition, None)
        self._holds[event.acquisition] = self._tracer.start_span(
            "aiodlock.lock.hold",
            attributes=_described(event),
            links=[] if wait is None else [trace.Link(wait.get_span_context())],
        )
        _end(wait, "acquired")
        self._count_wait(event, "acquired")

    def not_acquired(self, event: NotAcquiredEvent) -> None:
        wait = self._waits.pop(event.acquisition, None)
        # That another has the lock is no error of this span: the caller may have expected it.
        if wait is not None and event.outcome in ("unreachable", "error"):
            wait.set_attribute("error.type", type(event.error).__qualname__)
            wait.set_status(StatusCode.ERROR, str(event.error))
        _end(wait, event.outcome)
        self._count_wait(event, event.outcome)

    def extended(self, event: LockEvent) -> None:
        self._extensions.add(1, self._labels(event, _OUTCOME, "extended"))

    def at_risk(self, event: LockEvent) -> None:
        hold = self._holds.get(event.acquisition)
        if hold is not None:
            hold.add_event("at risk", {"aiodlock.lock.left": event.left})
        self._extensions.add(1, self._labels(event, _OUTCOME, "at_risk"))

    def lost(self, event: LostEvent) -> None:
        reason = event.reason.name.lower()
        hold = self._holds.pop(event.acquisition, None)
        if hold is not None:
            hold.set_attribute(_REASON, reason)
            hold.set_status(StatusCode.ERROR, f"lost: {event.reason.value}")
        _end(hold, "lost")
        self._hold.record(event.held, self._labels(event, _OUTCOME, "lost"))
        self._losses.add(1, self._labels(event, _REASON, reason))

    def released(self, event: LockEvent) -> None:
        _end(self._holds.pop(event.acquisition, None), "released")
        self._hold.record(event.held, self._labels(event, _OUTCOME, "released"))

    def _count_wait(self, event: LockEvent, outcome: str) -> None:
        labels = self._labels(event, _OUTCOME, outcome)
        self._wait.record(event.waited, labels)
        self._acquisitions.add(1, labels)

    def _labels(self, event: LockEvent, what: str, value: str) -> dict[str, str]:
        """What a metric carries: few values, whatever is locked."""
        labels: dict[str, str] = {_KIND: event.kind, what: value}
        if self._name_attribute is not None:
            labels[_NAME] = self._name_attribute(event.name)
        return labels


def _seconds(meter: Meter, name: str, description: str) -> Histogram:
    return meter.create_histogram(
        name, "s", description, explicit_bucket_boundaries_advisory=_BOUNDARIES_S
    )


def _end(span: Span | None, outcome: str) -> None:
    if span is not None:
        span.set_attribute(_OUTCOME, outcome)
        span.end()


def _described(event: LockEvent) -> dict[str, Any]:
    """What a span carries."""
    described: dict[str, Any] = {
        _NAME: event.name,
        _KIND: event.kind,
        "aiodlock.lock.holder": event.holder,
    }
    if event.fencing_token is not None:
        described["aiodlock.lock.fencing_token"] = event.fencing_token
    return described
