"""The page of a whole box in a real browser: a job from its file to the chat by mouse alone, a switch of the
mode, every page, and a page that stays open while the controller is killed.

It prints where the pictures of each page are, and how long the page of a job stood still after the kill.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import page_pictures
from tests.e2e.box_support import WholeBox, gsm8k, wait_for, whole_box

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright here (pip install playwright)")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(
        page_pictures.BROWSER is None, reason="no browser here (Debian: apt-get install chromium-headless-shell)"
    ),
]
WAIT_MS = 600_000
SETTINGS = "[box]\ndevices = 2\nstart_timeout_s = 600\n[serve]\nstart_timeout_s = 600\n"


def press(page: Any, name: str | re.Pattern[str]) -> None:
    page.get_by_role("button", name=name).click()


def go(page: Any, name: str) -> None:
    page.get_by_role("navigation").get_by_role("link", name=name, exact=True).click()
    page.get_by_role("heading", level=1, name=name).wait_for()


def begin_job(page: Any, data: Path, epochs: int) -> str:
    """From the list of jobs to the page of a new one; its id."""
    go(page, "Jobs")
    page.get_by_role("link", name="New job").click()
    with page.expect_file_chooser() as chooser:
        page.get_by_label("Or upload one").first.click()
    chooser.value.set_files(data)
    page.get_by_text("has no faults").wait_for()
    page.get_by_role("spinbutton", name="Epochs", exact=True).fill(str(epochs))
    press(page, "Estimate")
    page.get_by_text("fits", exact=True).wait_for()
    press(page, "Begin the job")
    page.wait_for_url(re.compile("#/jobs/ftjob-"))
    return page.url.rpartition("/")[2]


def switch(page: Any, policy: str) -> str:
    """What the page says would happen; then it is switched."""
    go(page, "Box")
    press(page, "Switch the mode")
    page.get_by_role("radio", name=re.compile(f"^{policy}")).check()
    press(page, "Show what would happen")
    page.get_by_role("button", name="Switch now").wait_for()
    told = page.locator("form.switch .plan").inner_text()
    press(page, "Switch now")
    page.locator(f"[data-mode={policy.lower()}]").wait_for()
    return told


def step_of(page: Any) -> int:
    return int(re.search(r"Step ([\d,]+) of", page.locator("main").inner_text())[1].replace(",", ""))


def see_every_page(page: Any, box: WholeBox, job: str, pictures: Path) -> None:
    links = page.get_by_role("navigation").get_by_role("link")
    places = [str(links.nth(at).get_attribute("href")) for at in range(links.count())]
    assert len(places) == 13
    (file,) = {row["id"] for row in box.client().files.list(purpose="fine-tune").to_dict()["data"][:1]}
    for place in (*places, f"#/jobs/{job}", "#/models/starter", f"#/data/{file}"):
        page.evaluate(f"location.hash = {place!r}")
        page.get_by_role("heading", level=1).wait_for()
        page.locator(".loading").first.wait_for(state="detached")
        told = page.locator("main").inner_text()
        assert len(told) > 40, f"{place}: {told}"
        if place != "#/logs":  # lines of processes, which have their own words
            assert not re.search(r"\[object|undefined|NaN|\bnull\b", told), f"{place}: {told}"
        if place not in ("#/box", "#/health"):  # the machine may be short of something
            assert page.locator(".alert.bad").count() == 0, f"{place}: {told}"
        page.screenshot(path=pictures / f"{place.strip('#/').replace('/', '-')}.png", full_page=True)


def test_a_whole_box_by_mouse_and_over_the_death_of_its_controller(tmp_path: Path) -> None:
    data, home, pictures, faults = tmp_path / "train.jsonl", tmp_path / "box", tmp_path / "pictures", list[str]()
    data.write_bytes(gsm8k("train", 24))
    home.mkdir()
    pictures.mkdir()
    with whole_box(home, SETTINGS) as box, playwright.sync_playwright() as driver:
        browser = page_pictures.launch(driver)
        url = f"http://127.0.0.1:{box.port}"
        page = page_pictures.watched_page(browser, url, faults, viewport={"width": 1240, "height": 900})
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{url}/ui")
        page.get_by_label("API key").fill(box.key)
        press(page, "Log in")
        page.get_by_text("n0/1", exact=True).wait_for()

        go(page, "Models")
        box.make_starter()
        page.get_by_role("link", name="starter", exact=True).wait_for()

        begin_job(page, data, 2)
        page.locator(".u-wrap").first.wait_for()
        page.get_by_text("succeeded", exact=True).first.wait_for()
        page.screenshot(path=pictures / "job-succeeded.png", full_page=True)
        page.get_by_role("link", name="Try it in the chat").click()
        page.get_by_label("Message").fill("Tom has 3 apples and buys 4 more. How many apples does he have?")
        press(page, "Send")
        page.locator(".turn.assistant[data-at=done]").wait_for()
        assert "tokens" in page.locator(".turn.assistant .times").inner_text()
        page.screenshot(path=pictures / "chat-answered.png")

        longer = begin_job(page, data, 50)
        page.locator(".u-wrap").first.wait_for()
        told = switch(page, "Serve")
        print(told, flush=True)
        page.locator(".tile.train").first.wait_for(state="detached")
        assert box.job(longer)["phase"] in ("suspended", "suspending", "queued")
        switch(page, "Train")
        page.locator(".tile.train").first.wait_for()
        go(page, "Timeline")
        page.locator("td button.link").first.click()
        page.get_by_role("region", name="Steps of the hand-over").wait_for()
        page.screenshot(path=pictures / "timeline-steps.png", full_page=True)

        see_every_page(page, box, longer, pictures)
        assert not faults, faults

        page.goto(f"{url}/ui#/jobs/{longer}")
        page.get_by_text(re.compile(r"Step \d+ of")).first.wait_for()
        before = max(step_of(page), max(box.losses(longer)))
        began_s = time.monotonic()
        box.kill_controller()
        wait_for(lambda: step_of(page) > before + 1, "steps on the page that was open", 300)
        print(f"page of a job: further steps {time.monotonic() - began_s:.1f} s after kill -9 of the controller")
        playwright.expect(page.locator(".alert.bad")).to_have_count(0, timeout=WAIT_MS)
        press(page, "Cancel the job")
        press(page, "Cancel the job")
        page.get_by_text("cancelled", exact=True).first.wait_for()
        page.screenshot(path=pictures / "job-after-the-kill.png", full_page=True)
        print(f"{len(list(pictures.iterdir()))} pictures in {pictures}")
        page.context.close()  # before the box: it would ask for its events again
        browser.close()
