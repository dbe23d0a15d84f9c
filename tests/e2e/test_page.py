"""The page at /ui in a real browser (Debian's chromium, headless): login, devices, a mode switch, a job's file and its
errors, a streamed answer; without console messages or requests to other origins. The gateway and the control app are
real, the engine is canned.
"""

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.controller.jobs.events import JobEvents
from appliance.store import jobs, models
from appliance.store.rows import DEPLOYMENTS, DeploymentRow, JobRow
from appliance.ui.site import site
from tests.e2e import page_pictures
from tests.front.box import MODEL, Front, free_port, running_front
from tests.simulator.control_plane import change
from tests.unit.controller.conftest import insert_model

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright here (pip install playwright)")
expect = playwright.expect
pytestmark = pytest.mark.skipif(
    page_pictures.BROWSER is None, reason="no browser here (Debian: apt-get install chromium-headless-shell)"
)
WAIT_MS = 30_000
expect.set_options(timeout=WAIT_MS)
Visit = Callable[..., Any]


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(imports=False) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        opened = page_pictures.launch(driver)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser: Any, front: Front) -> Iterator[Visit]:
    """Open a page logged in with a key. The test end checks console and contacted hosts. loud: errors allowed."""
    contexts, faults = [], []

    def enter(
        url: str = front.url, key: str | None = front.key, place: str = "", loud: bool = False, **options: Any
    ) -> Any:
        page = page_pictures.watched_page(browser, url, [] if loud else faults, **options)
        contexts.append(page.context)
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{url}/ui{place}")
        if key is not None:
            page.get_by_label("API key").fill(key)
            page.keyboard.press("Enter")
            page.get_by_role("navigation").wait_for()
        return page

    yield enter
    for context in contexts:
        context.close()
    assert not faults


def test_each_docs_screenshot_is_generated_and_used(browser: Any, front: Front, tmp_path: Path) -> None:
    """`make pictures` renews the screenshots in docs/."""
    docs = Path(__file__).parents[2] / "docs"
    shown = {name for text in docs.glob("*.md") for name in re.findall(r"ui-[\w-]+\.png", text.read_text())}
    made = page_pictures.take(browser, front, tmp_path)
    assert {path.name for path in docs.glob("ui-*.png")} == set(made) == shown
    assert all((tmp_path / name).stat().st_size > 20_000 for name in made)


def test_reload_keeps_login_and_logout_ends_it(visit: Visit, front: Front) -> None:
    """The last requests of the other tab get 401, which its console may report."""
    page = visit(loud=True)
    page.get_by_text("n0/7").wait_for()
    cookies = page.context.cookies()
    assert {cookie["path"] for cookie in cookies} == {"/admin/v1", "/v1"}
    assert all(cookie["httpOnly"] and cookie["sameSite"] == "Strict" for cookie in cookies)
    kept = page.evaluate("JSON.stringify(localStorage) + JSON.stringify(sessionStorage) + document.cookie")
    assert front.key not in kept and all(cookie["value"] not in kept for cookie in cookies)
    page.reload()
    page.get_by_text("n0/7").wait_for()
    beside = page.context.new_page()
    beside.goto(f"{front.url}/ui#/keys")
    beside.get_by_text("this one", exact=True).wait_for()
    beside.get_by_role("button", name="Log out").click()
    page.get_by_label("API key").wait_for()
    with front.http() as http:
        front.wait(lambda: cookies[0]["name"] not in http.get("/admin/v1/sessions").text)
    front.wait(lambda: not page.context.cookies())


def test_page_polls_only_while_visible_and_over_restart(visit: Visit, front: Front) -> None:
    """Its console reports the requests that failed meanwhile."""
    page, asked = visit(place="#/keys", loud=True), []
    page.on("request", lambda request: asked.append(time.monotonic()) if request.url.endswith("/v1/keys") else None)

    def make_key(name: str) -> None:
        with front.http() as http:
            http.post("/admin/v1/keys", json={"name": name, "scopes": ["read"]}).raise_for_status()

    def hide(hidden: bool) -> None:
        page.evaluate(
            "hidden => Object.defineProperty(document, 'hidden', { value: hidden, configurable: true })", hidden
        )
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    page.get_by_text("All keys").wait_for()
    make_key("seen")
    page.get_by_text("seen", exact=True).first.wait_for(timeout=8_000)
    front.restart_control()
    make_key("after-a-restart")
    page.get_by_text("after-a-restart", exact=True).first.wait_for(timeout=20_000)
    hide(True)
    page.wait_for_timeout(2_500)  # for requests that were due
    make_key("hidden")
    before = len(asked)
    page.wait_for_timeout(6_000)
    assert len(asked) <= before + 1
    hide(False)
    page.get_by_text("hidden", exact=True).first.wait_for(timeout=4_000)


@pytest.fixture
def provider() -> Iterator[str]:
    """URL of a real OpenID provider with the user ann in the group `ml`."""
    pytest.importorskip("oidc_provider_mock", reason="no provider here (pip install oidc-provider-mock)")
    port = free_port()
    ann = json.dumps({"sub": "ann", "preferred_username": "ann", "groups": ["ml"]})
    command = [sys.executable, "-m", "oidc_provider_mock", "--port", str(port), "--user-claims", ann]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return httpx.get(f"{url}/.well-known/openid-configuration").status_code == 200
        except httpx.TransportError:
            return False

    try:
        Front.wait(answers)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def test_provider_login_has_scopes_of_group(visit: Visit, provider: str, tmp_path: Path) -> None:
    port, secret = free_port(), tmp_path / "secret"
    secret.write_text("between us\n")
    settings = {"issuer": provider, "client_id": "box", "name": "our directory"}
    settings |= {"groups": {"ml": ["inference", "fine_tuning"]}, "client_secret_path": str(secret)}
    with running_front(imports=False, controller={"oidc": settings}, port=port) as front:
        page = visit(front.url, None, "#/jobs", loud=True)

        def go(button: str) -> None:
            page.get_by_role("button", name="Log in with our directory").click()
            page.wait_for_url(f"{provider}/**", wait_until="commit")
            page.get_by_role("button", name=button, exact=True).click()

        go("Deny")
        page.get_by_text("The login provider refused").wait_for()
        go("ann")
        page.get_by_role("navigation").wait_for()
        assert page.evaluate("location.search") == ""
        names = page.get_by_role("navigation").get_by_role("link").all_inner_texts()
        assert "Jobs" in names and "Chat" in names and "Audit" not in names and "Box" not in names
        page.reload()
        page.get_by_role("navigation").wait_for()
        with front.http() as http:
            (row,) = [row for row in http.get("/admin/v1/keys").json()["data"] if row["name"].startswith("ann-")]
            assert row["scopes"] == ["inference", "fine_tuning"]
            http.delete(f"/admin/v1/keys/{row['id']}")
        page.get_by_text("This login has ended").wait_for()
        go("ann")
        page.get_by_text("your access to this box was revoked").wait_for()
        page.close()


def test_login_ends_with_key_and_is_useless_to_other_pages(visit: Visit, front: Front) -> None:
    page = visit(key=key_with(front, "read", "admin"), place="#/queue", loud=True)
    # The browser sends the cookie, but the request lacks the page's header, or has that of another login.
    for headers in ("{}", "{'x-appliance-page': 'session_x.y'}"):
        asked = f"fetch('/admin/v1/keys', {{credentials: 'include', headers: {headers}}})"
        assert page.evaluate(f"{asked}.then((answer) => answer.status)") == 401
    link = page.context.new_page().goto(f"{front.url}/admin/v1/keys")
    assert link.status == 401 and "API key" in link.text()
    with front.http() as http:
        for row in http.get("/admin/v1/keys").json()["data"]:
            if row["name"] == "with-read-admin":
                http.delete(f"/admin/v1/keys/{row['id']}")
    page.get_by_text("This login has ended").wait_for()


def test_box_page_shows_devices_and_previews_mode_switch(visit: Visit, front: Front) -> None:
    page = visit()
    for number in range(8):
        page.get_by_text(f"n0/{number}", exact=True).wait_for()
    page.get_by_role("button", name="Switch the mode").click()
    page.get_by_role("radio", name=re.compile("^Train")).check()
    assert page.get_by_role("button", name="Switch now").count() == 0
    page.get_by_role("button", name="Show what would happen").click()
    page.get_by_text("Nothing would move.").wait_for()
    with front.http() as http:
        assert http.get("/admin/v1/mode").json()["policy"] == "auto"
    page.get_by_role("button", name="Switch now").click()
    page.locator("[data-mode=train]").wait_for()
    with front.http() as http:
        assert http.get("/admin/v1/mode").json()["policy"] == "train"


def test_chat_page_streams_answer_with_times_and_code(visit: Visit) -> None:
    page = visit(place="#/chat")
    page.get_by_role("button", name="Add a model beside").click()
    page.get_by_label("Message").fill("hi")
    page.keyboard.press("Enter")
    page.locator(".turn.assistant[data-at=done]").nth(1).wait_for()
    told = page.locator(".turn.assistant").all_inner_texts()
    assert len(told) == 2 and all("word word" in one and "first token" in one for one in told)
    page.get_by_role("button", name="Code").first.click()
    page.locator("dialog[open]").wait_for()  # its text is there a moment before it is shown, and Escape closes what is
    code = page.locator("dialog pre").inner_text()
    assert f'model="{MODEL}"' in code and "sk-appl-" not in code
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")


def test_file_is_checked_by_line_and_starts_job(visit: Visit, tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.jsonl", tmp_path / "good.jsonl"
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    bad.write_text(json.dumps(row) + '\n{"no": 1}\n')
    good.write_text("\n".join([json.dumps(row)] * 12))
    page = visit(place="#/jobs/new")
    page.get_by_label("Or upload one").first.set_input_files(bad)
    page.get_by_text("has 1 bad lines").wait_for()
    expect(page.get_by_role("cell", name="2", exact=True)).to_have_count(1)
    page.get_by_label("Or upload one").first.set_input_files(good)
    page.get_by_text("has no faults").wait_for()
    page.get_by_role("button", name="Begin the job").click()
    page.get_by_text("Created fine-tuning job").wait_for()
    page.get_by_role("button", name="Cancel the job").click()
    page.get_by_role("button", name="Cancel the job").click()
    page.get_by_text("cancelled", exact=True).first.wait_for()


def key_with(front: Front, *scopes: str) -> str:
    """Create a key of a new owner, and wait until the gateways have it."""
    with front.http() as http:
        made = http.post("/admin/v1/keys", json={"name": f"with-{'-'.join(scopes)}", "scopes": list(scopes)}).json()
    with front.http(made["key"]) as http:
        front.wait(lambda: http.get("/admin/v1/me").status_code == 200)
    return made["key"]


def test_key_without_scope_sees_reason(visit: Visit, front: Front) -> None:
    page = visit(key=key_with(front, "inference"), place="#/box")
    page.get_by_text("Your key has no scope read").wait_for()
    assert page.get_by_role("navigation").get_by_role("link", name="Box").count() == 0


def trained(front: Front, key: str) -> str:
    """Insert a job at its third step of four, with metrics of rewards and of a teacher; return its id."""
    job_id = page_pictures.begun(front, key, "seen")
    context = front.context
    assert context is not None

    def tell() -> None:
        events = JobEvents(context.db, context.files_dir, "local")
        events.started(job_id, ["n0/0", "n0/1"])
        for step in (1, 2, 3):
            more = {"total_steps": 4, "loss": 3.0 / step, "tokens_per_s": 900.0, "devices": 2}
            more |= {"train_mean_reward": step / 4, "reverse_kl": 1 / step}
            events.ingest(job_id, {"event": "metrics", "step": step, **more})
        events.ingest(job_id, {"event": "validation", "step": 3, "loss": 0.5, "reverse_kl": 0.5})

    front.call(tell)
    return job_id


def test_curves_show_only_metrics_readable_by_key(visit: Visit, front: Front) -> None:
    tuner = key_with(front, "fine_tuning")
    job_id = trained(front, tuner)
    # A tuning key reads its own events, a reader key all metrics; only events have measurements of methods.
    for key, drawn in ((tuner, 4), (key_with(front, "read"), 2), (front.key, 4)):
        page = visit(key=key, place=f"#/jobs/{job_id}")
        page.locator(".u-wrap").nth(drawn - 1).wait_for()
        expect(page.locator(".u-wrap")).to_have_count(drawn)
        taught = "Reverse KL from the teacher, nats a token 1 → 0.3333; Validation 0.5 → 0.5"
        for name in ("Mean reward 0.25 → 0.75", taught):
            expect(page.get_by_role("img", name=name)).to_have_count(int(drawn == 4))
        expect(page.get_by_role("button", name="Pause")).to_have_count(int(drawn == 4))
        page.goto(page.url.partition("#")[0])
        page.context.close()


def test_version_gets_share_and_is_promoted(visit: Visit, front: Front) -> None:
    context = front.context
    assert context is not None

    def deploy() -> None:
        insert_model(context.db, "org/two", versions=("v1", "v2"))
        DEPLOYMENTS.insert(context.db, DeploymentRow("org/two", 1.0))

    front.call(deploy)
    page = visit(place="#/models")
    page.get_by_role("link", name="org/two").click()
    row = page.get_by_role("row").filter(has=page.get_by_text("v1", exact=True))
    row.get_by_role("button", name="Canary").click()
    page.get_by_label("Share, %").fill("25")
    page.get_by_role("button", name="Begin").click()
    page.get_by_text("v1 beside v2, with 25 % of the conversations.").wait_for()
    page.get_by_role("button", name="Promote").click()
    page.get_by_role("button", name="Promote").click()
    page.get_by_text("promoted", exact=True).wait_for()
    with front.http() as http:
        assert http.get("/admin/v1/models/org/two").json()["active_version"] == "v1"


def test_data_report_shows_counts_and_lines(visit: Visit, front: Front) -> None:
    row = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "ann.lee@example.org"}]}
    with front.http() as http:
        sent = {"file": ("people.jsonl", "\n".join([json.dumps(row)] * 12).encode())}
        file_id = http.post("/v1/files", data={"purpose": "fine-tune"}, files=sent).json()["id"]
    page = visit(place="#/data")
    page.get_by_role("link", name="people.jsonl").click()
    page.get_by_role("button", name="Check").click()
    page.get_by_text("a job takes it").wait_for(timeout=200_000)  # checked in a separate process
    assert page.url.endswith(file_id)
    duplicates = page.get_by_role("row").filter(has_text="duplicates").first
    assert "11" in duplicates.inner_text() and "92 %" in duplicates.inner_text()
    lines = page.get_by_role("region", name="By line")
    lines.get_by_role("row").filter(has_text="line 1").first.wait_for()
    assert "ann.lee" not in page.locator("main").inner_text()


def evaluated(front: Front) -> str:
    """Insert an evaluation with a run in which two of three answers are right; return its id."""
    check = {"type": "string_check", "name": "same", "operation": "eq"}
    check |= {"input": "{{sample.output_text}}", "reference": "{{item.answer}}"}
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    config = {"type": "custom", "item_schema": schema, "include_sample_schema": True}
    items = [
        {"item": {"answer": answer}, "sample": {"output_text": text}}
        for answer, text in (("four", "four"), ("five", "5"), ("six", "six"))
    ]
    source = {"type": "jsonl", "source": {"type": "file_content", "content": items}}
    with front.http() as http:
        body = {"name": "sums", "data_source_config": config, "testing_criteria": [check]}
        eval_id = http.post("/v1/evals", json=body).raise_for_status().json()["id"]
        run = {"name": "first", "data_source": source}
        made = http.post(f"/v1/evals/{eval_id}/runs", json=run).raise_for_status().json()
        front.wait(lambda: http.get(f"/v1/evals/{eval_id}/runs/{made['id']}").json()["status"] == "completed")
    return eval_id


@pytest.fixture(scope="module")
def judged(front: Front) -> str:
    """Insert an evaluation; return its id."""
    return evaluated(front)


def test_evaluation_pages_show_all_items(visit: Visit, front: Front, judged: str) -> None:
    page = visit(place="#/evals")
    page.get_by_role("link", name="sums").click()
    page.get_by_role("row").filter(has_text="first").get_by_text("67 %").wait_for()
    page.get_by_role("link", name="first").click()
    page.get_by_text('{"answer":"five"}').wait_for()
    with front.http() as http:
        report_url = http.get(f"/v1/evals/{judged}/runs").json()["data"][0]["report_url"]
    assert report_url.partition("/ui")[2] == page.url.partition("/ui")[2]
    page.get_by_role("button", name="Passed").click()
    page.get_by_text('{"answer":"six"}').wait_for()
    assert page.get_by_text('{"answer":"five"}').count() == 0


@pytest.fixture(scope="module")
def everything(front: Front, judged: str) -> list[str]:
    """Create one object of each kind; returns the addresses of their pages."""
    job_id = trained(front, key_with(front, "fine_tuning", "inference"))
    return [f"#/jobs/{job_id}", "#/jobs/new", f"#/models/{MODEL}", f"#/evals/{judged}"]


def settled(page: Any) -> None:
    page.get_by_role("heading", level=1).wait_for()
    page.locator(".loading").first.wait_for(state="detached")


# Not every combination is needed: colours depend only on the scheme, names and texts only on the language.
@pytest.mark.parametrize(("locale", "scheme"), [("en-US", "light"), ("zh-CN", "dark")])
def test_axe_finds_no_violation_on_any_page(
    visit: Visit, front: Front, everything: list[str], axe: str, locale: str, scheme: str
) -> None:
    page = visit(key=None, locale=locale, color_scheme=scheme, viewport={"width": 1200, "height": 900})
    page.locator("input").first.wait_for()
    found = {"login": faults_of(page, axe)}
    page.locator("input").first.fill(front.key)
    page.keyboard.press("Enter")
    page.get_by_role("navigation").wait_for()
    links = page.get_by_role("navigation").get_by_role("link")
    places = [str(links.nth(number).get_attribute("href")) for number in range(links.count())]
    assert len(places) > 10
    for place in (*places, *everything):
        page.evaluate(f"location.hash = {json.dumps(place)}")
        settled(page)
        found[place] = faults_of(page, axe)
        # Pages that are reached by a link of a list: a run, a file.
        for link in page.locator("main td a").all()[:3] if place in places else ():
            href = str(link.get_attribute("href"))
            if href.startswith("#/") and href not in found:
                found[href] = []
    for href in [place for place, faults in found.items() if place.startswith("#/") and place not in places]:
        page.evaluate(f"location.hash = {json.dumps(href)}")
        settled(page)
        found[href] = faults_of(page, axe)
    assert len(found) > len(places) + 4
    assert {place: faults for place, faults in found.items() if faults} == {}
    page.evaluate("document.querySelector('main').append(document.createElement('img'))")
    assert any(fault.startswith("image-alt") for fault in faults_of(page, axe)), "it sees a fault where one is"


@pytest.fixture(scope="module")
def axe() -> str:
    """axe-core's source."""
    package = importlib.util.find_spec("axe_playwright_python")
    if package is None or package.origin is None:
        pytest.skip("no axe here (pip install axe-playwright-python)")
    return Path(package.origin).with_name("axe.min.js").read_text()


def faults_of(page: Any, axe: str) -> list[str]:
    """Violations of any axe rule on a page: rule and element."""
    if not page.evaluate("typeof axe === 'object'"):
        page.evaluate(axe)
    told = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['id']}: {one['help']}: {node['target']} {node['failureSummary']}"
        for one in told["violations"]
        for node in one["nodes"]
    ]


@pytest.fixture(scope="module")
def empty() -> Iterator[Front]:
    """A box without a model."""
    with running_front(imports=False) as front:
        front.call(lambda: models.delete(front.context.db, MODEL))
        yield front


def test_first_model_is_added_on_page(visit: Visit, empty: Front) -> None:
    """On an empty box the job form has no model to choose, so the pages must show how to add one."""
    page = visit(empty.url, empty.key, "#/jobs/new")
    page.get_by_text("There is no model to train yet").wait_for()
    page.get_by_role("main").get_by_role("link", name="Models").click()
    page.get_by_text("This box has no model yet").wait_for()
    source, name = (page.get_by_role("textbox", name=re.compile(label)) for label in ("^From", "^Name"))
    source.fill("/models/tiny")
    name.fill("tiny")
    page.get_by_role("button", name="Import").click()
    page.get_by_role("link", name="tiny").wait_for()


def insert_jobs(front: Front, count: int, first: int = 0) -> None:
    """Insert ended jobs with the models `ft:starter:local:nNNN:job`, the newest last."""
    resolved = {"publish": "end", "n_epochs": 1, "batch_size": 1, "options": {}}
    for number in range(first, first + count):
        name, at_s = f"ft:starter:local:n{number:03}:job", 1e9 + number
        row = JobRow(f"ftjob-{number:03}", "starter", "supervised", "file-1", 1, output_model=name, created_s=at_s)
        ended = dataclasses.replace(row, phase="cancelled", finished_s=at_s, resolved=resolved)
        front.call(lambda row=ended: jobs.insert(front.context.db, row))


def test_long_list_is_searched_and_shows_older_rows(visit: Visit, empty: Front) -> None:
    insert_jobs(empty, 150)
    page = visit(empty.url, empty.key, "#/jobs")
    rows = page.locator("tbody tr")
    rows.nth(99).wait_for()
    expect(rows).to_have_count(100)
    page.get_by_label("Find").fill("n007")
    page.get_by_text("Nothing here has these words.").wait_for()
    page.get_by_role("button", name="Show older ones").click()
    page.get_by_role("link", name="ft:starter:local:n007:job").wait_for()
    expect(rows).to_have_count(1)
    expect(page.get_by_role("button", name="Show older ones")).to_have_count(0)
    page.get_by_label("Find").fill("")
    rows.nth(149).wait_for()
    expect(rows).to_have_count(150)
    expect(page.get_by_role("link", name="n000")).to_have_count(1)
    insert_jobs(empty, 3, first=150)
    rows.nth(152).wait_for()
    expect(rows, "those that newer ones push out of the first page stay").to_have_count(153)


STICKING_OUT = """[...document.querySelectorAll('.card > header :is(button, select)')].filter((part) =>
    part.getBoundingClientRect().right > part.closest('.card').getBoundingClientRect().right - 8
).map((part) => part.textContent)"""
WRITTEN_OVER = """[...document.querySelectorAll('.axis span')].filter((mark) => mark.offsetWidth)
    .filter((mark, at, all) => at && all[at - 1].getBoundingClientRect().right > mark.getBoundingClientRect().left)
    .map((mark) => mark.textContent)"""


def with_memory(status: dict[str, Any], host: dict[str, Any]) -> dict[str, Any]:
    return {**status, "memory": {**status["memory"], "host": host}}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_phone_in_chinese(visit: Visit, front: Front, scheme: str) -> None:
    page = visit(key=None, viewport={"width": 360, "height": 740}, locale="zh-CN", color_scheme=scheme)
    page.get_by_label("API 密钥").wait_for()
    assert page.evaluate("document.documentElement.lang") == "zh-CN"
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    # Only a complete box reports the memory of its machine.
    host = {"where": "this machine", "total_bytes": 8, "available_bytes": 4, "short": ""}
    page.route("**/admin/v1/status", lambda asked: asked.fulfill(json=with_memory(asked.fetch().json(), host)))
    page.get_by_label("API 密钥").fill(front.key)
    page.keyboard.press("Enter")
    page.get_by_text("本机的内存").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_pages_fit_width_and_are_reached_by_keyboard(visit: Visit, front: Front) -> None:
    assert front.context is not None
    trouble = {"name": "gateway", "since_s": 1e9, "why": "it ended", "failures": 2}
    change(front.context, main_troubles=lambda: [trouble])
    page = visit(viewport={"width": 360, "height": 740})
    page.get_by_text("gateway failed 2 times").wait_for()
    links = page.get_by_role("navigation").get_by_role("link")
    for place in range(links.count()):
        links.nth(place).focus()
        page.keyboard.press("Enter")
        name = links.nth(place).inner_text()
        page.get_by_role("heading", level=1, name=name).wait_for()
        page.locator(".loading").first.wait_for(state="detached")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, name
        assert page.evaluate(STICKING_OUT) == [] and page.evaluate(WRITTEN_OVER) == [], name
        assert not re.search(r"\[object|undefined|NaN|\bnull\b", page.locator("main").inner_text()), name
        assert page.evaluate("document.activeElement.tagName") == ("A" if place == 0 else "H1")


def test_key_is_created_shown_once_and_revoked(visit: Visit, front: Front) -> None:
    page = visit(place="#/keys")
    page.get_by_role("button", name="New key").click()
    page.get_by_role("textbox", name="Name", exact=True).fill("ann")
    page.get_by_role("button", name="Make the key").click()
    page.locator("dialog[open]").wait_for()
    made = page.locator("dialog pre").inner_text().strip()
    with front.http(made) as http:
        front.wait(lambda: http.get("/admin/v1/me").json().get("name") == "ann")
    page.keyboard.press("Escape")
    row = page.get_by_role("row").filter(has_text="ann")
    assert made not in page.content()
    row.get_by_role("button", name="Revoke").click()
    row.get_by_role("button", name="Revoke").click()
    row.get_by_text("revoked").wait_for()
    with front.http(made) as http:
        front.wait(lambda: http.get("/admin/v1/me").status_code == 401)


def lanes(page: Any, handovers: list[dict[str, Any]], status: dict[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    """Spans that pages/lanes.js draws between 0 and 100: (kind, holder, from, to) by device."""
    (path,) = [path.decode() for path in site() if path.endswith(b"/lanes.js")]
    told = page.evaluate(
        f"([of, now]) => import('{path}').then((m) => m.lanesOf(of, now, 0, 100))", [handovers, status]
    )
    return {
        lane["device"]: [(one["kind"], one["name"], one["from"], one["to"]) for one in lane["spans"]]
        for lane in told["lanes"]
    }


def test_lanes_follow_journal_and_current_holders(visit: Visit) -> None:
    def handover(time: float, verb: str, target: str, *devices: str) -> dict[str, Any]:
        step = {"verb": verb, "target": target, "state": "done", "ended_s": time, "detail": {"devices": devices}}
        return {"id": str(time), "started_s": time, "ended_s": time, "steps": [step]}

    status = {
        "box": {"started_s": 50},
        "replicas": [{"id": "r2", "model": "m"}],
        "jobs": [{"id": "j", "output_model": "tuned"}],
        "devices": [
            {"id": "a", "holder": {"kind": "replica", "id": "r2"}},
            {"id": "b", "holder": None},
            {"id": "c", "holder": {"kind": "job", "id": "j"}},
        ],
    }
    of = [
        handover(60, "acquire", "2:replica:r2", "a"),
        handover(20, "release", "3:job:x", "b"),
        handover(10, "acquire", "1:replica:r1", "a"),
    ]
    found = lanes(visit(key=None), of, status)
    # r1 was never released: the box stopped meanwhile, and restarted at 50.
    assert found["a"] == [("free", "", 0, 10), ("serve", "r1", 10, 50), ("free", "", 50, 60), ("serve", "m", 60, 100)]
    assert found["b"] == [("train", "x", 0, 20), ("free", "", 20, 100)]
    assert found["c"] == [("train", "tuned", 0, 100)]


def test_timeline_zooms_by_pointer_and_keyboard(visit: Visit) -> None:
    page = visit(place="#/timeline")
    lane = page.locator(".bar").first.bounding_box()
    at = lane["y"] + lane["height"] / 2
    page.mouse.move(lane["x"] + lane["width"] * 0.25, at)
    page.mouse.down()
    page.mouse.move(lane["x"] + lane["width"] * 0.5, at, steps=3)
    page.locator(".drawn").first.wait_for()
    page.mouse.up()
    page.locator(".axis").get_by_text(":").first.wait_for()
    axis = page.locator(".axis .bar span")
    ticks = [[int(part) for part in text.split(":")] for text in axis.all_inner_texts()]
    seconds = [3600 * hours + 60 * minutes + second for hours, minutes, second in ticks]
    assert (seconds[2] - seconds[0]) % 86400 == pytest.approx(450, abs=10), "half of a quarter of an hour"
    page.get_by_role("button", name="Wider").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Later").focus()
    for _ in range(3):
        page.keyboard.press("Enter")
    axis.get_by_text("now").wait_for()
    expect(axis.first).to_have_text("−30 min")
    page.get_by_role("button", name="1 h", exact=True).click()
    expect(axis.first).to_have_text("−60 min")
