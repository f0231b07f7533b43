"""The page for operators shows what they would see."""

from __future__ import annotations

import asyncio
import re

import pytest

from aiodlock.testing import LockServer
from tests import operators_page, topologies
from tests.test_operating import OPERATOR_PERMISSIONS

pytestmark = pytest.mark.deep


async def test_sessions_of_the_page_are_what_a_terminal_shows(server: LockServer) -> None:
    """In the order of the page, up to times, numbers and ids."""
    sessions = operators_page.sessions()
    assert {session.command.split()[1] for session in sessions} == {"ls", "show", "wait", "break"}
    async with operators_page.world(server.url):
        for session in sessions:
            seen = await asyncio.to_thread(operators_page.held, session, server.url)
            assert operators_page.alike(seen.seen) == operators_page.alike(session.seen)


def test_alike_keeps_what_matters() -> None:
    """Names, words, counts; not times, numbers, ids and room."""
    line = "web-3:0123456789abcdef0123456789abcdef  27.8 s  2  1796036624600362  ------"
    assert operators_page.alike(line) == "web-3:ID TIME 2 NUMBER ---"
    assert operators_page.alike("granted 3 h 5 min ago by web-3:01234567") == (
        "granted TIME ago by web-3:ID"
    )


async def test_permissions_of_the_page_are_what_operators_need(server: LockServer) -> None:
    """The rule as it stands there, which the server takes."""
    page = operators_page.PAGE.read_text("utf-8")
    found = re.search(r"ACL SETUSER operator.*?```", page, re.DOTALL)
    assert found is not None
    rule = found[0].removesuffix("```").split()
    said = {each for each in rule if each[0] in "+~"}
    assert said == set(OPERATOR_PERMISSIONS)
    assert await topologies.ask(server, *rule) == "OK"
    await topologies.ask(server, "ACL", "DELUSER", "operator")
