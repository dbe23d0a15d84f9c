"""The page at /ui: sent without a key, with its policy, and nothing but its own files."""

from __future__ import annotations

import pytest

from appliance.ui.site import CONTENT_SECURITY, site

from .conftest import Start

SCRIPT = next(path for path in site() if path.endswith(b"/app.js")).decode()


@pytest.mark.parametrize("target", ["/ui", "/ui/", "//ui", "/ui?x=1", SCRIPT])
async def test_the_page_is_sent_without_a_key_and_without_a_table(start_box: Start, target: str) -> None:
    box = await start_box()
    box.state.generation = -1
    answer = await box.ask("GET", target, key=None)
    assert answer.status == 200
    assert answer.headers["content-security-policy"] == CONTENT_SECURITY.decode()
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["content-type"].startswith("text/javascript" if target == SCRIPT else "text/html")
    assert ("immutable" in answer.headers["cache-control"]) == (target == SCRIPT)
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "target",
    [
        "/ui/app.js",
        "/uix",
        "/ui/../admin/v1/status",
        "/ui/..%2f..%2fsite.py",
        SCRIPT.replace("app.js", "../site.py"),
    ],
)
async def test_nothing_else_is_below_it(start_box: Start, target: str) -> None:
    box = await start_box()
    answer = await box.ask("GET", target, key=None)
    assert answer.status == 404 and answer.error["code"] == "unknown_url"


async def test_the_bare_address_leads_a_browser_to_the_page_and_is_no_url_for_programs(start_box: Start) -> None:
    box = await start_box()
    told = await box.ask("GET", "/", key=None, headers="Accept: text/html,application/xhtml+xml,*/*;q=0.8\r\n")
    assert told.status == 303 and told.headers["location"] == "/ui" and told.headers["vary"] == "accept"
    for accept in ("*/*", "application/json"):
        answer = await box.ask("GET", "/", key=None, headers=f"Accept: {accept}\r\n")
        assert answer.status == 404 and answer.error["code"] == "unknown_url", accept
