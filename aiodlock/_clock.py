"""The clock, with the pure arithmetic on deadlines."""

from __future__ import annotations

import math
import numbers
import time
from typing import Final

TTL_MIN_S: Final = 0.01
# 1e15 ms stays exact in a double (Lua) after the server has added its own clock.
TTL_MAX_S: Final = 1e12
ALIVE_MIN_S: Final = 1.0
ALIVE_MAX_S: Final = 6.0

_DRIFT_SHARE: Final = 0.01
_DRIFT_S: Final = 0.002

# Pauses end in steps, so that many share one timer and one call. Long ones end in every fourth,
# or in fewer: no pause has more than 2000 ends.
STEP_S: Final = 0.005
_LONG_S: Final = 0.2
_STEPS_OF_LONG: Final = 4
_ENDS_MAX: Final = 2000

# The clock that goes on while the machine sleeps: a lease does run out during a suspend.
_CLOCK_ID: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Seconds on the clock of every deadline; never the wall clock, which steps."""
    return time.clock_gettime(_CLOCK_ID)


def deadline(sent_at: float, ttl_left_ms: int) -> float:
    """Until when we may believe in a lease that had *ttl_left_ms* after *sent_at*.

    The drift taken off covers clocks that run at different rates, and Redis' millisecond grain.
    """
    ttl_left_s = ttl_left_ms / 1000
    return sent_at + ttl_left_s - ttl_left_s * _DRIFT_SHARE - _DRIFT_S


def ttl_ms(ttl_s: float) -> int:
    """Whole milliseconds, rounded up: a ttl must never become 0, which deletes the key."""
    return math.ceil(ttl_s * 1000)


def alive(ttl_s: float) -> float:
    """How long a waiter counts as alive after a poll, in seconds."""
    return min(ALIVE_MAX_S, max(ttl_s, ALIVE_MIN_S))


def poll_interval(alive_s: float) -> float:
    """The longest pause between two polls of a waiter, in seconds."""
    return alive_s / 3


def extension_delay(valid_s: float, random: float) -> float:
    """Seconds until a lease that is valid for *valid_s* is to be extended.

    A third of it, at most.
    """
    return jittered(valid_s / 3, random)


def jittered(pause_s: float, random: float) -> float:
    """Up to 10 % shorter, so that many do not move in step; *random* in [0, 1)."""
    return pause_s * (1 - 0.1 * random)


def step_at_end(now_s: float, pause_s: float) -> int:
    """In which step a pause ends that begins now: at its end, or a moment before.

    What falls due together is done by one call; but many in one step make the loop stand still.
    """
    step = int((now_s + pause_s) / STEP_S)
    if pause_s <= _LONG_S:
        return step
    return step - step % max(_STEPS_OF_LONG, int(pause_s / STEP_S) // _ENDS_MAX)


def growing(failures: int, *, first_s: float, most_s: float) -> float:
    """Seconds before the try after *failures* (1 or more) in a row: doubling from *first_s*."""
    return min(most_s, first_s * 2.0 ** min(failures - 1, 30))


def seconds(what: str, value: object, *, minimum: float, maximum: float = math.inf) -> float:
    """*value* as a float if it is a real number within the bounds.

    Raises:
        TypeError: Not a real number (None, bool, str, Decimal and timedelta are not).
        ValueError: NaN, or out of bounds.
    """
    allowed = f"a real number of seconds, at least {minimum:g}"
    if maximum != math.inf:
        allowed += f" and at most {maximum:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{what} must be {allowed}; got {value!r}")
    number = as_float(value)
    if not minimum <= number <= maximum:
        raise ValueError(f"{what} must be {allowed}; got {value!r}")
    return number


def as_float(value: numbers.Real) -> float:
    """*value*, NaN where no float can hold it."""
    try:
        return float(value)
    except OverflowError:
        return math.nan


def ttl_seconds(what: str, value: object) -> float:
    """*value* if it is a ttl that a server can keep."""
    return seconds(what, value, minimum=TTL_MIN_S, maximum=TTL_MAX_S)
