"""The page at /ui: sent without a key, with its policy, and nothing but its own files."""

from __future__ import annotations

import gzip

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


async def test_it_is_compressed_and_not_sent_again(start_box: Start) -> None:
    box = await start_box()
    plain = await box.ask("GET", SCRIPT, key=None)
    packed = await box.ask("GET", SCRIPT, key=None, headers="Accept-Encoding: gzip, br\r\n")
    assert packed.headers["content-encoding"] == "gzip" and gzip.decompress(packed.body) == plain.body
    again = await box.ask("GET", SCRIPT, key=None, headers=f"If-None-Match: {plain.headers['etag']}\r\n")
    assert again.status == 304 and not again.body and "content-length" not in again.headers


@pytest.mark.parametrize(
    "target",
    [
        "/ui/app.js",
        "/ui/nosuch",
        "/uix",
        "/ui/../admin/v1/status",
        "/ui/%2e%2e/etc/passwd",
        "/ui/..%2f..%2fsite.py",
        "/ui\\x",
        f"{SCRIPT}/x",
        SCRIPT.replace("app.js", "../site.py"),
        SCRIPT.replace("app.js", "index.html"),
        "/ui/%00",
    ],
)
@pytest.mark.parametrize("key", [None, "sk-test-all"])
async def test_nothing_else_is_below_it(start_box: Start, target: str, key: str | None) -> None:
    box = await start_box()
    answer = await box.ask("GET", target, key=key)
    assert answer.status == 404 and answer.error["code"] == "unknown_url"


async def test_the_bare_address_leads_a_browser_to_the_page_and_is_no_url_for_programs(start_box: Start) -> None:
    box = await start_box()
    told = await box.ask("GET", "/", key=None, headers="Accept: text/html,application/xhtml+xml,*/*;q=0.8\r\n")
    assert told.status == 303 and told.headers["location"] == "/ui" and told.headers["vary"] == "accept"
    for accept in ("*/*", "application/json"):
        answer = await box.ask("GET", "/", key=None, headers=f"Accept: {accept}\r\n")
        assert answer.status == 404 and answer.error["code"] == "unknown_url", accept


LARGEST = max(site().items(), key=lambda item: len(item[1].plain))


async def test_who_reads_late_is_answered_all_in_order(start_box: Start) -> None:
    box = await start_box()
    wire = await box.connect()
    wire.reader._limit = 1
    await box.until(lambda: bool(box.state.connections))
    (conn,) = box.state.connections
    targets = []

    async def ask(*asked: bytes) -> None:
        targets.extend(asked)
        await wire.send(b"".join(b"GET %b HTTP/1.1\r\nHost: box\r\n\r\n" % target for target in asked))

    while not conn.flow.write_paused:
        count = box.answered()
        await ask(LARGEST[0])
        await box.until(lambda count=count: box.answered() > count or conn.flow.write_paused)
    await ask(b"/ui", LARGEST[0], b"/nosuch", b"/ui")
    wire.reader._limit = 1 << 16
    for target in targets:
        answer = await wire.response()
        assert answer.body == site()[target].plain if target in site() else answer.status == 404
    await ask(b"/ui")
    assert (await wire.response()).body == site()[b"/ui"].plain
