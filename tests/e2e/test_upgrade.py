"""A box installed from bundles is moved from one release to the next, and back, while it is used.

Both releases are built from this tree, the newer one with a further change of the schema. What they need beside the
appliance's own wheel comes from this environment, so that two bundles of a gigabyte need not be made.
"""

from __future__ import annotations

import site
import subprocess
import threading
from collections import Counter
from pathlib import Path

import httpx
import openai
import pytest

from appliance.bundle import signing, wheels
from appliance.bundle.make import PROJECT, write
from tests.bundle_support import parts, run
from tests.e2e.box_support import WholeBox, gsm8k, wait_for
from tests.e2e.machines_support import deploy_tiny

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3000)]

SETTINGS = "[box]\ndevices = 2\nstart_timeout_s = 400\n[serve]\nstart_timeout_s = 600\n"
OLDER, NEWER = "9.1", "9.2"


class ReleasedBox(WholeBox):
    """A box whose commands are those of the current release of a folder of releases."""

    def __init__(self, data_dir: Path, prefix: Path):
        super().__init__(data_dir)
        self._command = str(prefix / "bin" / "appliance")

    def run(self, *arguments: str, code: int = 0, timeout_s: float = 300) -> str:
        if arguments[0] in ("down", "upgrade", "rollback"):
            self.note_segments()
        return run(self._command, *arguments, code=code, timeout=timeout_s, env=self.environment()).stdout

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "PYTHONPATH": ""}


def released(folder: Path, version: str, migration: str, key: signing.SecretKey) -> Path:
    sources = folder / f"sources-{version}"
    wheels.copy_sources(PROJECT, sources, version)
    if migration:
        (sources / "appliance" / "store" / "migrations" / "9001_newest.sql").write_text(migration)
    (folder / "own").mkdir(exist_ok=True)
    wheels.own_wheel(sources, folder / "own")
    own = folder / "own" / f"appliance-{version}-py3-none-any.whl"
    write(target := folder / f"{version}.run", parts(folder, version, own), key)
    return target


def installed(bundle: Path, prefix: Path, version: str) -> None:
    run("sh", bundle, "install", prefix)
    (packages,) = prefix.glob(f"releases/{version}/venv/lib/python3*/site-packages")
    (packages / "of-the-tests.pth").write_text("".join(f"{folder}\n" for folder in site.getsitepackages()))


class Load:
    """Streams, one after the other on each of two threads, each on a connection of its own."""

    def __init__(self, box: WholeBox):
        self.box, self.seen = box, Counter[str]()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(2)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(300)

    def _run(self) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(limits=limits, timeout=300) as http:
            while not self._over.is_set():
                self.seen[self._one(http)] += 1
                self._over.wait(0.2)

    def _one(self, http: httpx.Client) -> str:
        pieces, reason = 0, None
        try:
            stream = self.box.client(http_client=http).chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "Go on."}],
                max_tokens=24,
                temperature=0,
                stream=True,
            )
            for chunk in stream:
                pieces, reason = pieces + 1, chunk.choices[0].finish_reason if chunk.choices else reason
        except openai.APIStatusError as error:
            return f"refused with {error.status_code}"
        except (openai.APIConnectionError, httpx.TransportError) as error:
            return f"cut after {pieces} pieces: {error!r}" if pieces else "nobody listened"
        except openai.APIError as error:
            return f"ended with an error: {error}"
        return "answered" if reason else f"cut after {pieces} pieces, without an error"


def version_of(box: WholeBox) -> str:
    return str(box.admin("status")["box"]["version"])


def test_to_the_next_release_and_back_under_load(tmp_path):
    key, prefix = signing.new_key(), tmp_path / "opt"
    installed(released(tmp_path, OLDER, "", key), prefix, OLDER)
    newer = released(tmp_path, NEWER, "CREATE TABLE newest (x);\n", key)
    box = ReleasedBox(tmp_path / "box", prefix)
    box.data_dir.mkdir()
    (box.data_dir / "appliance.toml").write_text(SETTINGS)
    try:
        box.up()
        assert version_of(box) == OLDER
        deploy_tiny(box)
        box.set_mode(policy="split", train_devices=1)
        job = box.submit("tiny", box.upload(gsm8k("train", 400)), "--epochs 40 --batch-size 4")
        wait_for(lambda: len(box.steps(job)) > 20, "steps before the upgrade", 900)
        with Load(box) as load:
            wait_for(lambda: load.seen["answered"] > 3, "answers before the upgrade", 300)
            installed(newer, prefix, NEWER)
            before = box.steps(job)[-1]["step"]
            box.run("upgrade", NEWER, "--timeout", "900", timeout_s=1800)
            assert version_of(box) == NEWER
            answered = load.seen["answered"]
            wait_for(lambda: load.seen["answered"] > answered + 3, "answers after the upgrade", 600)
        print(f"{OLDER} -> {NEWER}:", dict(load.seen))
        assert not [what for what in load.seen if what.startswith(("cut", "ended"))], load.seen
        wait_for(lambda: box.steps(job)[-1]["step"] > before + 5, "the job to go on", 900)
        steps = [row["step"] for row in box.steps(job)]
        assert steps == [*range(steps[0], steps[-1] + 1)], "no step twice, none missing"

        box.run("key", "create", "--name", "since")
        told = box.ask("rollback", "--dry-run")
        assert told["lost"]["API keys"] == 1 and not told["done"] and version_of(box) == NEWER
        box.run("rollback", "--yes", "--timeout", "900", timeout_s=1800)
        assert version_of(box) == OLDER
        assert "since" not in box.run("key", "list")
        assert box.client(max_retries=5).chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Go on."}], max_tokens=4
        )
        step = box.steps(job)[-1]["step"]
        wait_for(lambda: box.steps(job)[-1]["step"] > step + 5, "the job to go on with the older release", 900)
        box.run("job", "cancel", job)
        box.run("down", timeout_s=600)
        assert box.left() == []
    finally:
        subprocess.run([str(prefix / "bin" / "appliance"), "down", "--force", "--data-dir", str(box.data_dir)])
        box.destroy()
