"""A program that locks in every way and prints what came of it; tests run it under many flags.

It asserts nothing (`python -O` takes asserts away): whoever runs it compares.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys

from aiodlock import LeaseLostError, Lock, LockClient, LockInfo, LockTimeout
from tests.until import until

TTL_S = 0.8


async def whole_life(url: str) -> dict[str, object]:
    """What a lock's life looks like, step by step."""
    asyncio.get_running_loop().slow_callback_duration = 10  # A loaded machine is no news here.
    seen: dict[str, object] = {}
    async with LockClient.from_url(url) as ours, LockClient.from_url(url) as others:
        lock = ours.lock("life", ttl=TTL_S)
        async with lock as lease:
            seen["held"] = lease.is_held
            seen["second"] = await others.lock("life").try_acquire()
            try:
                await others.lock("life").acquire(wait_timeout=0.05)
            except LockTimeout as timeout:
                seen["in the way"] = timeout.holder == lease.holder
            waiting = asyncio.create_task(others.lock("life").acquire())
            cancelled = asyncio.create_task(others.lock("life").acquire())
            await until(functools.partial(two_wait, lock))
            cancelled.cancel()
            await asyncio.wait((cancelled,))
            seen["cancelled"] = cancelled.cancelled()
            await asyncio.sleep(TTL_S)
            seen["kept"] = lease.state
            lease.check(0.001)
        next_lease = await waiting
        seen["in order"] = next_lease.fencing_token > lease.fencing_token
        await ours.lock("life").break_lock()
        try:
            async with next_lease:
                await next_lease.extend()
        except LeaseLostError as lost:
            seen["lost"] = lost.reason.name
        seen["free"] = await lock.inspect() == LockInfo(False, None, None, None, 0)
        return seen


async def two_wait(lock: Lock) -> bool:
    """Whether both have come."""
    return (await lock.inspect()).waiters == 2


WHOLE_LIFE = {
    "held": True,
    "second": None,
    "in the way": True,
    "cancelled": True,
    "kept": "held",
    "in order": True,
    "lost": "DELETED",
    "free": True,
}
"""What it must print."""


def main(url: str, loop: str) -> None:
    """Run it on asyncio's own loop, or on that of `uvloop`, and print what was seen."""
    if loop == "uvloop":
        import uvloop

        seen = uvloop.run(whole_life(url))
    else:
        seen = asyncio.run(whole_life(url))
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
