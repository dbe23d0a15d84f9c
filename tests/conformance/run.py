"""Runs openai-python's own API tests, for the routes that a box has, against a box.

    python -m tests.conformance.run                      # starts the control app on a free port, without Ray
    python -m tests.conformance.run --data-dir DIR       # against the box running on this data directory, inference too

The tests are in the SDK's source distribution on the package registry; pip fetches it once, with the user's settings,
into build/conformance/. Before each test, `reset_plugin.py` puts its fixtures into the store with `seed.py`. Exit code:
pytest's.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import uvicorn

from appliance.controller.app import create_app
from appliance.controller.interfaces.principal import Listener
from appliance.paths import BoxPaths
from appliance.store.database import Database
from tests.conformance import seed
from tests.simulator.control_plane import simulated_context

VERSION = "3.52.0"
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TESTS = (
    "tests/api_resources/test_files.py",
    "tests/api_resources/test_models.py",
    "tests/api_resources/fine_tuning/test_jobs.py",
    "tests/api_resources/fine_tuning/jobs/test_checkpoints.py",
    "tests/api_resources/fine_tuning/alpha/test_graders.py",
    "tests/api_resources/test_evals.py",
    "tests/api_resources/evals/test_runs.py",
    "tests/api_resources/evals/runs/test_output_items.py",
    "tests/api_resources/test_batches.py",
    "tests/api_resources/test_uploads.py",
    "tests/api_resources/uploads/test_parts.py",
    "tests/api_resources/test_responses.py",
    "tests/api_resources/responses/test_input_items.py",
    "tests/api_resources/chat/test_completions.py",
    "tests/api_resources/chat/completions/test_messages.py",
)
# "complete with all params" sends the text "md5" as the checksum of the bytes, which a box that compares checksums must
# refuse. Requests for responses and chat completions are inference (below), and no route compacts a response: no engine
# does.
CHOSEN = (
    "not (Uploads and complete_with_all_params) and not (test_responses and (create or compact))"
    " and not (chat and test_completions and create)"
)
# Inference requests only; TESTS has the routes of stored objects.
INFERENCE_TESTS = (
    "tests/api_resources/chat/test_completions.py",
    "tests/api_resources/test_completions.py",
    "tests/api_resources/test_embeddings.py",
    "tests/api_resources/test_responses.py",
    "tests/api_resources/responses/test_input_tokens.py",
)
# "All params" tests send values that an engine must refuse: max_tokens=0, best_of=0, the word "foo" as a token's
# number, one dimension of a model that has no nested ones; of responses, a conversation and a prompt that only OpenAI
# has. The SDK requests embeddings in base64 by default, which its strict validation (also with aiohttp) refuses.
INFERENCE_CHOSEN = "(create or count) and not all_params and not (Embeddings and (strict or aiohttp))"


class SourcesMissing(RuntimeError):
    """The SDK's source distribution could not be fetched; the message holds pip's reason."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="of a running box; default: start an app without Ray")
    parser.add_argument("--cache-dir", type=Path, default=ROOT / "build" / "conformance")
    parser.add_argument("pytest_arguments", nargs="*", help="arguments for pytest, e.g. -- -k pause -x")
    options = parser.parse_args(argv)
    try:
        sources = fetch_sources(options.cache_dir)
    except SourcesMissing as error:
        print(error, file=sys.stderr)
        return 1
    code = 0
    if options.data_dir is not None:
        with answering_box(options.data_dir) as url:
            code = run_inference_tests(sources, f"{url}/v1", options.pytest_arguments)
    with running_box(options.data_dir) as (url, data_dir):
        return run_tests(sources, f"{url}/v1", data_dir, options.pytest_arguments) or code


def fetch_sources(cache_dir: Path) -> Path:
    """Path of the unpacked source distribution, downloaded if missing. Raises SourcesMissing."""
    unpacked = cache_dir / f"openai-{VERSION}"
    if not (unpacked / "tests").is_dir():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir) as folder:
            options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary", "openai", "--dest", folder]
            command = [sys.executable, "-m", "pip", "download", *options, f"openai=={VERSION}"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise SourcesMissing(
                    f"the source distribution openai=={VERSION} could not be fetched; pip says:\n{done.stderr}"
                )
            (archive,) = Path(folder).glob("openai-*.tar.gz")
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
            (Path(folder) / f"openai-{VERSION}").rename(unpacked)
    return unpacked


@contextlib.contextmanager
def running_box(data_dir: Path | None) -> Iterator[tuple[str, Path]]:
    """(base URL, data directory) of the box to test; removes the fixtures from its store afterwards."""
    if data_dir is None:
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder, served_app(Path(folder)) as url:
            yield url, Path(folder)
        return
    with controller_of(data_dir) as (box, paths, url):
        before = box.get("/admin/v1/mode").raise_for_status().json()
        # Otherwise seeded jobs would start to train, without weights.
        box.put("/admin/v1/mode?wait=true", json={"policy": "serve"}).raise_for_status()
        with Database(paths.database) as db:
            seed.reset(db, paths.files)
        _republish_keys(box)
        try:
            yield url, paths.data_dir
        finally:
            with Database(paths.database) as db:
                seed.remove(db, paths.files)
            _republish_keys(box)
            mode = {"policy": before["policy"]}
            if before["train_devices"] is not None:
                mode["train_devices"] = before["train_devices"]
            box.put("/admin/v1/mode", json=mode).raise_for_status()


@contextlib.contextmanager
def answering_box(data_dir: Path) -> Iterator[str]:
    """Base URL of the running box, with real engines for the models of the inference tests."""
    from tests.conformance.served_models import served_models

    with controller_of(data_dir) as (box, paths, url):
        with Database(paths.database) as db:
            seed.add_keys(db)
        _republish_keys(box)
        with served_models(data_dir):
            yield url


@contextlib.contextmanager
def controller_of(data_dir: Path) -> Iterator[tuple[httpx.Client, BoxPaths, str]]:
    """A client of a running box's controller, the box's paths and its base URL."""
    paths = BoxPaths.of(data_dir)
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(paths.controller_socket)), base_url="http://box") as box:
        yield box, paths, json.loads(paths.state_file.read_text())["url"]


@contextlib.contextmanager
def served_app(folder: Path) -> Iterator[str]:
    """Base URL of the control app in a thread, with a simulated rest of the box and data in `folder`."""
    listener = socket.create_server(("127.0.0.1", 0))
    ready = threading.Event()
    servers: list[uvicorn.Server] = []

    def serve() -> None:
        # Only the thread that opens the database may use it.
        with Database(folder / "appliance.db") as db:
            app = create_app(simulated_context(folder, db))
            config = uvicorn.Config(Listener(app), log_level="warning", loop="asyncio", lifespan="on")
            servers.append(uvicorn.Server(config))
            ready.set()
            servers[0].run(sockets=[listener])

    thread = threading.Thread(target=serve, name="served app")
    thread.start()
    try:
        if not ready.wait(30):
            raise TimeoutError("the control app did not start within 30 s")
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(30)
        listener.close()


def _republish_keys(box: httpx.Client) -> None:
    """Create and revoke a key, which makes the controller read all keys again and send them to the gateways."""
    made = box.post("/admin/v1/keys", json={"name": "conformance republish", "scopes": ["inference"]})
    box.delete(f"/admin/v1/keys/{made.raise_for_status().json()['id']}").raise_for_status()


def run_tests(sources: Path, base_url: str, data_dir: Path, arguments: list[str]) -> int:
    """Run openai-python's tests of stored objects, with fresh fixtures before each; returns pytest's exit code."""
    environment = {"CONFORMANCE_DATA_DIR": str(data_dir), "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])}
    return _pytest(sources, base_url, environment, ["-p", "reset_plugin", *TESTS, "-k", CHOSEN, *arguments])


def run_inference_tests(sources: Path, base_url: str, arguments: list[str]) -> int:
    """Run openai-python's tests of inference; returns pytest's exit code."""
    environment = {"PYTHONPATH": str(HERE)}
    arguments = ["-p", "request_plugin", *INFERENCE_TESTS, "-k", INFERENCE_CHOSEN, *arguments]
    return _pytest(sources, base_url, environment, arguments)


def _pytest(sources: Path, base_url: str, environment: dict[str, str], arguments: list[str]) -> int:
    """Run pytest in the SDK's own tree, in a new process."""
    options = ["-p", "no:cacheprovider", "-q", "--tb=short", "-o", "addopts=", "-o", "filterwarnings=default"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    base = {"TEST_API_BASE_URL": base_url, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=sources, env={**os.environ, **base, **environment}).returncode


if __name__ == "__main__":
    sys.exit(main())
