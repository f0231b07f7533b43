"""One job in the crontabs of three machines: each tick is worked on by one of them.

The line in each crontab, with the URL of your lock server:

    AIODLOCK_URL=redis://locks.example:6379
    */5 * * * *  aiodlock run -q -n -E 0 --ttl 60 --hold-at-least 60 report -- /srv/report

Run it, to see one tick of three such machines, the clock of the last one being late:

    pip install 'aiodlock[embedded]'
    python cron_job.py

It starts a lock server; AIODLOCK_URL takes yours.
"""

import asyncio
import contextlib
import os
import sys

from aiodlock.testing import lock_server

OPTIONS = ("-q", "-n", "-E", "0", "--ttl", "60", "--hold-at-least", "60")


def job() -> None:
    """What cron is to run: any program, in any language."""
    print("the report is made, under fencing token", os.environ["AIODLOCK_FENCING_TOKEN"])


async def tick(machine: str, url: str, *, late: float) -> None:
    """What cron does on one machine."""
    await asyncio.sleep(late)
    line = ("-m", "aiodlock", "run", *OPTIONS, "report", "--", sys.executable, __file__, "job")
    env = {**os.environ, "AIODLOCK_URL": url}
    process = await asyncio.create_subprocess_exec(sys.executable, *line, env=env)
    print(f"machine {machine}: exit code {await process.wait()}")


async def main() -> None:
    with contextlib.ExitStack() as stack:
        url = os.environ.get("AIODLOCK_URL") or stack.enter_context(lock_server()).url
        ticks = (tick("A", url, late=0), tick("B", url, late=0), tick("C", url, late=2))
        await asyncio.gather(*ticks)


if __name__ == "__main__":
    if sys.argv[1:] == ["job"]:
        job()
    else:
        asyncio.run(main())
