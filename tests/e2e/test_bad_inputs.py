"""Harmful inputs through the real gateway to the real control app: each is refused with a code, and neighbours that
send requests meanwhile are not affected. Imports are accepted (202), and their operation fails.
"""

import io
import json
import pickle
import socket
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from appliance.controller.app import create_app
from tests.front.box import MODEL, Front, running_front
from tests.front.clients import CHAT, Neighbours
from tests.unit.models import checkpoints

MIB = 1 << 20
UPLOAD_BYTES = 24 * MIB
# The largest input of any row takes 8 MiB as bytes, and as much as objects.
PEAK_BYTES = 192 * MIB
JOBS, IMPORT = "/v1/fine_tuning/jobs", "/admin/v1/models/import"
FORM = {"content-type": "multipart/form-data; boundary=x"}


@dataclass(frozen=True)
class Answer:
    """status of the answer; error: its error object, or that of the resulting file or operation."""

    status: int
    error: dict[str, Any]


Send = Callable[[httpx.Client, Path], Answer]


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    # A much shorter window would also cut off neighbours whose client is delayed by a busy machine.
    limits = {"upload_body_bytes": UPLOAD_BYTES, "body_grace_s": 3.0}
    with running_front(controller={"upload_bytes": UPLOAD_BYTES - MIB}, limits=limits, sweep_s=0.1) as running:
        yield running


def refused(response: httpx.Response) -> Answer:
    data = response.json()
    error = data.get("error")
    assert error is None or set(error) == {"message", "type", "param", "code"}, data
    return Answer(response.status_code, error or {})


def body(path: str, text: str | bytes) -> Send:
    """Send this JSON body unchanged."""
    return lambda client, _: refused(client.post(path, content=text, headers={"content-type": "application/json"}))


def chat(field: str) -> Send:
    return body(CHAT, f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "hi"}}], {field}}}')


def image(url: str) -> Send:
    part = {"type": "image_url", "image_url": {"url": url}}
    return body(CHAT, json.dumps({"model": MODEL, "messages": [{"role": "user", "content": [part]}]}))


def job(**fields: Any) -> Send:
    """Create a job with a valid training file and these `fields`."""

    def send(client: httpx.Client, _: Path) -> Answer:
        return refused(client.post(JOBS, json={"model": MODEL, "training_file": training_file(client)} | fields))

    return send


def training_file(client: httpx.Client) -> str:
    row = {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}
    return upload(client, (json.dumps(row) + "\n").encode() * 12).json()["id"]


def upload(client: httpx.Client, content: bytes, name: bytes = b"train.jsonl", **headers: str) -> httpx.Response:
    form = (
        b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
        b'--x\r\ncontent-disposition: form-data; name="file"; filename="%b"\r\n\r\n%b\r\n--x--\r\n' % (name, content)
    )
    return client.post("/v1/files", content=form, headers=FORM | headers)


def named(name: bytes) -> Send:
    return lambda client, _: refused(upload(client, b"{}", name))


def file(make: Callable[[], bytes]) -> Send:
    """Upload invalid training data: the file is stored with its error, and no job starts with it."""

    def send(client: httpx.Client, _: Path) -> Answer:
        made = upload(client, make()).raise_for_status().json()
        assert made["status"] == "error", made
        started = client.post(JOBS, json={"model": MODEL, "training_file": made["id"]})
        if started.status_code != 200:
            return refused(started)
        ended: dict[str, Any] = {}

        def over() -> bool:
            ended.update(client.get(f"{JOBS}/{started.json()['id']}").json())
            return ended["status"] == "failed"

        Front.wait(over)
        return Answer(200, ended["error"])

    return send


def imported(make: Callable[[Path], Path]) -> Send:
    def send(client: httpx.Client, folder: Path) -> Answer:
        answer = client.post(IMPORT, json={"source": str(make(folder / "source")), "name": "hostile"})
        if answer.status_code != 202:
            return refused(answer)
        ended = answer.json()["operation"]

        def over() -> bool:
            ended.update(client.get(f"/admin/v1/operations/{ended['id']}").json()["operation"])
            return ended["state"] != "running"

        Front.wait(over)
        assert ended["state"] == "failed", ended
        names = [model["name"] for model in client.get("/admin/v1/models").json()["data"]]
        assert names == [MODEL], names
        return Answer(202, ended["error"])

    return send


def weights(content: bytes) -> Send:
    def make(folder: Path) -> Path:
        (checkpoints.write(folder) / "model.safetensors").write_bytes(content)
        return folder

    return imported(make)


def header(described: Any, data: bytes = bytes(12), length: int | None = None) -> bytes:
    text = json.dumps(described).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def linked(folder: Path) -> Path:
    (checkpoints.write(folder) / "generation_config.json").symlink_to("/etc/passwd")
    return folder


def remote_code(folder: Path) -> Path:
    return checkpoints.write(folder, config={"auto_map": {"AutoModel": "modeling_x.X"}})


def loops(folder: Path) -> Path:
    return checkpoints.write(folder, template=LOOPS)


def adapter(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 64}))
    (folder / "adapter_model.safetensors").write_bytes(header({}, b""))
    return folder


def zip_bomb() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("train.jsonl", bytes(64 * MIB))
    return out.getvalue()


def endless_line(client: httpx.Client, _: Path) -> Answer:
    """Send an endless line without an announced length: it is read up to the limit."""

    def parts() -> Iterator[bytes]:
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n{"messages": "'
        for _ in range(2 * 1024):
            yield b"a" * MIB

    answer = refused(client.post("/v1/files", content=parts(), headers=FORM))
    # Two readers count form and body; one chunk may exceed both limits.
    return Answer(answer.status, answer.error | {"param": None})


def announced_2gib(client: httpx.Client, _: Path) -> Answer:
    """Announce 2 GiB: refused by the length before any byte of the body is sent."""
    return raw(client, "POST /v1/files HTTP/1.1", FORM | {"content-length": str(2 << 30), "expect": "100-continue"})


def slow_upload(client: httpx.Client, _: Path) -> Answer:
    return raw(client, "POST /v1/files HTTP/1.1", FORM | {"content-length": "90000"})


def raw(client: httpx.Client, line: str, headers: dict[str, str]) -> Answer:
    """Send only a request head."""
    with socket.create_connection(("127.0.0.1", client.base_url.port or 0), timeout=20) as wire:
        lines = [line, "host: a", f"authorization: {client.headers['authorization']}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        wire.sendall("\r\n".join([*lines, "", ""]).encode())
        answer = b""
        while more := wire.recv(65536):
            answer += more
    head, _, text = answer.partition(b"\r\n\r\n")
    return Answer(int(head.split(b" ", 2)[1]), json.loads(text)["error"])


def gzip_body(client: httpx.Client, _: Path) -> Answer:
    return refused(upload(client, b"", **{"content-encoding": "gzip"}))


def without_key(client: httpx.Client, _: Path) -> Answer:
    """Send a request as a foreign page could by a browser: with cookies, but no key."""
    headers = {"origin": "https://elsewhere.example", "cookie": "session=1", "content-type": "text/plain"}
    return refused(httpx.post(f"{client.base_url}/admin/v1/keys", headers=headers, content='{"name": "x"}'))


def form_post(client: httpx.Client, _: Path) -> Answer:
    """Send content types that a form may use without a preflight request."""
    return refused(client.post("/admin/v1/keys", content='{"name": "x"}', headers={"content-type": "text/plain"}))


DEEP = "[" * 100_000 + "]" * 100_000
OVERLAP = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
}
LOOPS = "{% for a in range(3000) %}{% for b in range(30000) %}{% endfor %}{% endfor %}"

# input, sender, status, param, code
ROWS: list[tuple[str, Send, int, str | None, str | None]] = [
    ("path as filename", named(b"../../etc/x.jsonl"), 400, "file", "invalid_filename"),
    ("path as training file", job(training_file="/etc/passwd"), 400, "training_file", "file_not_found"),
    ("NUL in a filename", named(b"a\0.jsonl"), 400, "file", "invalid_filename"),
    ("5 kB filename", named(b"a" * 5000), 400, None, "invalid_body"),
    ("symlink in an import", imported(linked), 202, None, "unsafe_link"),
    ("zip bomb as a file", file(zip_bomb), 200, "training_file", "invalid_training_file"),
    ("body coded as gzip", gzip_body, 415, None, "unsupported_content_encoding"),
    ("2 GiB, announced", announced_2gib, 413, None, "request_too_large"),
    ("one endless line", endless_line, 413, None, "request_too_large"),
    ("JSON 100k deep", chat(f'"tools": {DEEP}'), 400, None, "invalid_json"),
    ("5,000-digit integer", chat('"seed": ' + "9" * 5000), 400, None, "invalid_json"),
    ("lone surrogate", chat('"user": "\\ud800"'), 400, None, "invalid_json"),
    ("temperature NaN", chat('"temperature": NaN'), 400, None, "invalid_json"),
    ("max_tokens 2^63", chat(f'"max_tokens": {1 << 63}'), 400, "max_tokens", "invalid_value"),
    ("chat_template", chat('"chat_template": "{{ x }}"'), 400, "chat_template", "unsupported_parameter"),
    ("nested loops in a template", imported(loops), 202, None, "template_refused"),
    ("link-local image", image("http://169.254.169.254/latest/meta-data"), 400, "image_url", "remote_media_refused"),
    ("pickle renamed", weights(pickle.dumps({"w": [0.0] * 99})), 202, None, "integrity_error"),
    ("header of 2^63 bytes", weights(header({}, length=1 << 63)), 202, None, "integrity_error"),
    ("overlapping offsets", weights(header(OVERLAP)), 202, None, "integrity_error"),
    ("auto_map", imported(remote_code), 202, None, "remote_code_refused"),
    ("LoRA adapter without a base", imported(adapter), 400, "base", "base_not_found"),
    ("upload that stops", slow_upload, 408, None, "request_timeout"),
    ("page elsewhere, no key", without_key, 401, None, "missing_api_key"),
    ("form post with a key", form_post, 400, None, "invalid_body"),
]


@pytest.fixture(scope="module")
def neighbours(front: Front) -> Iterator[Neighbours]:
    with Neighbours(front) as asking:
        yield asking
    assert not asking.failed and asking.asked > len(ROWS), (asking.asked, asking.failed[:3])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_bad_input_is_refused_with_code(front: Front, neighbours: Neighbours, row: Any, tmp_path: Path) -> None:
    _, send, status, param, code = row
    asked = neighbours.asked
    with front.http() as client:
        answer = send(client, tmp_path)
    assert (answer.status, answer.error.get("param"), answer.error.get("code")) == (status, param, code), answer
    assert len(answer.error["message"]) < 1000, answer
    front.wait(lambda: neighbours.asked > asked)
    assert not neighbours.failed
    assert front.peak_bytes() < PEAK_BYTES
    assert front.series("buffered_body_bytes")["buffered_body_bytes"] <= 2 * 1024


def test_unlisted_engine_routes_are_not_exposed(front: Front) -> None:
    """Tries vLLM's own control routes, with the strongest key and without a key."""
    private = (
        "pause resume sleep wake_up collective_rpc update_weights v1/load_lora_adapter invocations tokenize docs "
        "openapi.json server_info metrics/../pause"
    ).split()
    answered = front.counts.answered
    with front.http() as keyed, httpx.Client(base_url=front.url) as keyless:
        for path in private:
            for method in ("GET", "POST", "PUT"):
                assert keyed.request(method, f"/{path}").status_code in (404, 405), path
                assert keyless.request(method, f"/{path}").status_code in (401, 404, 405), path
        for path in ("/admin/v1/status", "/v1/files", "/metrics", "/v1/models"):
            assert keyless.get(path).status_code == 401
    assert front.counts.answered >= answered


def test_sockets_are_private_to_owner(front: Front) -> None:
    for name in ("c.sock", "bus.sock"):
        assert (front.folder / name).stat().st_mode & 0o777 == 0o600


# --- all requests that our OpenAPI document allows: never a 5xx; refusals are OpenAI error objects


@pytest.mark.parametrize("examples", [2, pytest.param(60, marks=pytest.mark.soak)])
def test_schema_requests_never_get_server_error(front: Front, examples: int) -> None:
    """Cases by schemathesis, half of them for existing objects; `pytest -m soak` sends thirty times as many."""
    document = front.call(lambda: create_app(front.context).openapi())  # type: ignore[arg-type]
    statuses: Counter[int] = Counter()
    operations = 0
    limits = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=examples < 10,
        suppress_health_check=list(HealthCheck),
    )
    with front.http() as client:
        known = existing_values(client)
        for found in schemathesis.openapi.from_dict(document).get_all_operations():
            operations += 1

            @limits
            @given(case=found.ok().as_strategy())
            def send(case: Any) -> None:
                for name in case.path_parameters:
                    if statuses.total() % 2 and case.method != "DELETE" and name in known:
                        case.path_parameters[name] = known[name]
                statuses[never_our_fault(client, case)] += 1

            send()
        assert client.get("/admin/v1/status").status_code == 200
    print(f"\n{operations} operations, {sum(statuses.values())} requests: {dict(sorted(statuses.items()))}")
    assert operations > 60 and sum(statuses.values()) >= operations and statuses[200] > 20


def existing_values(client: httpx.Client) -> dict[str, str]:
    """Values of existing objects by the name of the path parameter."""
    file_id = training_file(client)
    job = client.post("/v1/fine_tuning/jobs", json={"model": MODEL, "training_file": file_id}).raise_for_status()
    asked = {"model": MODEL, "input": "1+1?", "background": True}
    response = client.post("/v1/responses", json=asked).raise_for_status()
    return {
        "file_id": file_id,
        "job_id": job.json()["id"],
        "model": MODEL,
        "name": MODEL,
        "device_id": "n0/0",
        "response_id": response.json()["id"],
    }


def never_our_fault(client: httpx.Client, case: Any) -> int:
    given = case.as_transport_kwargs(base_url=str(client.base_url))
    given["headers"] = {**dict(given.get("headers") or {}), "authorization": client.headers["authorization"]}
    try:
        response = client.request(
            **{
                name: given[name]
                for name in ("method", "url", "params", "headers", "json", "data", "files")
                if given.get(name) is not None
            }
        )
    except (httpx.LocalProtocolError, httpx.InvalidURL, UnicodeError, TypeError):
        return 0  # an HTTP client cannot send it
    assert response.status_code < 500, (case.method, str(response.url), case.body, response.text[:500])
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"], error
    assert response.headers["x-request-id"]
    return response.status_code
