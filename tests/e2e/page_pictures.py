"""Takes the screenshots of the page for docs/: `make pictures` renews all of them.

A real gateway and the real control app serve the page; device holders and job metrics are simulated here.
"""

import json
import math
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from appliance.controller.jobs.events import JobEvents
from appliance.store import jobs, usage
from tests.front.box import MODEL, Front, running_front

BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")
STEPS, REACHED = 80, 62


def launch(driver: Any) -> Any:
    """Launch a browser with Playwright's `sync_playwright()`."""
    return driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-dev-shm-usage"])


def watched_page(browser: Any, url: str, faults: list[str], **options: Any) -> Any:
    """A page in a new context. Appends console messages and requests to other hosts than `url` to `faults`."""
    page = browser.new_context(**{"locale": "en-US", **options}).new_page()
    page.on("console", lambda line: faults.append(line.text) if line.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda asked: faults.append(asked.url) if not asked.url.startswith(url) else None)
    return page


def take(browser: Any, front: Front, folder: Path) -> list[str]:
    """Take all screenshots into `folder`; return their names."""
    for name, prepare in PICTURES.items():
        context = browser.new_context(locale="en-US", viewport={"width": 1240, "height": 900}, color_scheme="light")
        page = context.new_page()
        page.goto(f"{front.url}/ui{prepare(front)}")
        page.get_by_label("API key").fill(front.key)
        page.keyboard.press("Enter")
        page.get_by_role("navigation").wait_for()
        page.locator(".loading").first.wait_for(state="detached")
        page.locator(".u-wrap").last.wait_for()
        page.screenshot(path=folder / name)
        context.close()
    return list(PICTURES)


def begun(front: Front, key: str, suffix: str) -> str:
    """Create a queued job with a small file; return its id."""
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    data = "\n".join([json.dumps(row)] * 12).encode()
    with front.http(key) as http:
        sent = {"file": (f"{suffix}.jsonl", data)}
        file_id = http.post("/v1/files", data={"purpose": "fine-tune"}, files=sent).json()["id"]
        body = {"model": MODEL, "training_file": file_id, "suffix": suffix}
        job_id: str = http.post("/v1/fine_tuning/jobs", json=body).json()["id"]
        front.wait(lambda: http.get(f"/v1/fine_tuning/jobs/{job_id}").json()["status"] == "queued")
    return job_id


def _job(front: Front) -> str:
    """Simulate a job that trains on two devices after four, with a typical loss; return its address on the page."""
    job_id = begun(front, front.key, "sums")
    context = front.context
    assert context is not None
    drawn = random.Random(1)

    def tell() -> None:
        db = context.db
        events = JobEvents(db, context.files_dir, "local")
        events.started(job_id, ["n0/0", "n0/1"])
        for step in range(1, REACHED + 1):
            devices = 4 if step <= REACHED // 2 else 2
            loss = 0.6 + 2.4 * math.exp(-step / 18) + drawn.gauss(0, 0.05)
            speed = 5200.0 * devices + drawn.gauss(0, 300)
            told = {"step": step, "total_steps": STEPS, "loss": loss, "tokens_per_s": speed, "devices": devices}
            told |= {"learning_rate": 2e-4 * (1 - step / STEPS), "grad_norm": 0.4 + loss / 3 + drawn.gauss(0, 0.05)}
            events.ingest(job_id, {"event": "metrics", "tokens": 65_536, **told})
        jobs.update(db, job_id, eta_s=74.0)
        usage.devices_held(db, job_id, 1, 0.0)
        usage.devices_held(db, job_id, 0, 280.0)
        jobs.add_energy(db, job_id, 280 * 612.0, 280.0)

    front.call(tell)
    return f"#/jobs/{job_id}"


PICTURES: dict[str, Callable[[Front], str]] = {"ui-job.png": _job}
"""By file name: function that prepares the page and returns its address."""


def main() -> int:
    from playwright.sync_api import sync_playwright

    folder = Path(sys.argv[1])
    with sync_playwright() as driver, running_front(imports=False) as front:
        browser = launch(driver)
        print("\n".join(str(folder / name) for name in take(browser, front, folder)))
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
