"""Twenty inputs that hurt servers, through the real gateway into the real control app: each is refused by name, and the
neighbours, who keep asking all the while, notice nothing.

Imports are long work: they are accepted (202) and their operation fails.
"""

from __future__ import annotations

import io
import json
import pickle
import socket
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from tests.front.box import MODEL, Front, running_front
from tests.front.clients import CHAT, Neighbours
from tests.unit.models import checkpoints

MIB = 1 << 20
UPLOAD_BYTES = 24 * MIB
# The largest thing that any row makes it hold is 8 MiB, as bytes and as objects.
PEAK_BYTES = 192 * MIB
JOBS, IMPORT = "/v1/fine_tuning/jobs", "/admin/v1/models/import"
FORM = {"content-type": "multipart/form-data; boundary=x"}


@dataclass(frozen=True)
class Answer:
    """status of the answer; error: its error object, or that of the file or operation that it led to."""

    status: int
    error: dict[str, Any]


Send = Callable[[httpx.Client, Path], Answer]


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    # A window much shorter would cut off neighbours, too, where the machine lets their client wait.
    limits = {"upload_body_bytes": UPLOAD_BYTES, "body_grace_s": 3.0}
    with running_front(controller={"upload_bytes": UPLOAD_BYTES - MIB}, limits=limits, sweep_s=0.1) as running:
        yield running


def refused(response: httpx.Response) -> Answer:
    data = response.json()
    error = data.get("error")
    assert error is None or set(error) == {"message", "type", "param", "code"}, data
    return Answer(response.status_code, error or {})


def body(path: str, text: str | bytes) -> Send:
    """A JSON body, as it is."""
    return lambda client, _: refused(client.post(path, content=text, headers={"content-type": "application/json"}))


def chat(field: str) -> Send:
    return body(CHAT, f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "hi"}}], {field}}}')


def media(part: dict[str, Any]) -> Send:
    return body(CHAT, json.dumps({"model": MODEL, "messages": [{"role": "user", "content": [part]}]}))


def image(url: str) -> Send:
    return media({"type": "image_url", "image_url": {"url": url}})


def job(**fields: Any) -> Send:
    """A job on a sound training file but for `fields`."""

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
    """Training data that is none: the file is kept with its fault named, and no job starts on it."""

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
    """A line that never ends, its length not announced: read as far as the limit, and no further."""

    def parts() -> Iterator[bytes]:
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n{"messages": "'
        for _ in range(2 * 1024):
            yield b"a" * MIB

    answer = refused(client.post("/v1/files", content=parts(), headers=FORM))
    # Form and body are counted by two readers; the piece that passes a limit may pass both.
    return Answer(answer.status, answer.error | {"param": None})


def announced_2gib(client: httpx.Client, _: Path) -> Answer:
    """Refused by its announced length: not a byte of it is sent."""
    return raw(client, "POST /v1/files HTTP/1.1", FORM | {"content-length": str(2 << 30), "expect": "100-continue"})


def slow_upload(client: httpx.Client, _: Path) -> Answer:
    return raw(client, "POST /v1/files HTTP/1.1", FORM | {"content-length": "90000"})


def raw(client: httpx.Client, line: str, headers: dict[str, str]) -> Answer:
    """A head and nothing after it."""
    with socket.create_connection(("127.0.0.1", client.base_url.port or 0), timeout=20) as wire:
        lines = [line, "host: a", f"authorization: {client.headers['authorization']}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        wire.sendall("\r\n".join([*lines, "", ""]).encode())
        answer = b""
        while more := wire.recv(65536):
            answer += more
    head, _, text = answer.partition(b"\r\n\r\n")
    return Answer(int(head.split(b" ", 2)[1]), json.loads(text)["error"])


def without_key(client: httpx.Client, _: Path) -> Answer:
    """What a page elsewhere could make a browser send: its cookies, no key."""
    headers = {"origin": "https://elsewhere.example", "cookie": "session=1", "content-type": "text/plain"}
    return refused(httpx.post(f"{client.base_url}/admin/v1/keys", headers=headers, content='{"name": "x"}'))


def form_post(client: httpx.Client, _: Path) -> Answer:
    """The content types that a form can send without asking the server first."""
    return refused(client.post("/admin/v1/keys", content='{"name": "x"}', headers={"content-type": "text/plain"}))


DEEP = "[" * 100_000 + "]" * 100_000
VIDEO = "data:video/mp4;base64," + "A" * MIB
OVERLAP = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
}
LOOPS = "{% for a in range(3000) %}{% for b in range(30000) %}{% endfor %}{% endfor %}"

# number, what, how, status, param, code, words of the message
ROWS: list[tuple[str, str, Send, int, str | None, str | None, str]] = [
    ("1", "path as filename", named(b"../../etc/x.jsonl"), 400, "file", "invalid_filename", "expected a bare name"),
    (
        "2",
        "path as training file",
        job(training_file="/etc/passwd"),
        400,
        "training_file",
        "file_not_found",
        "not a file on this box",
    ),
    ("3", "NUL in a filename", named(b"a\0.jsonl"), 400, "file", "invalid_filename", "expected a bare name"),
    ("3", "newline in a filename", named(b"a\nb.jsonl"), 400, "file", "invalid_filename", "expected a bare name"),
    ("3", "5 kB filename", named(b"a" * 5000), 400, None, "invalid_multipart", "multipart"),
    ("4", "symlink in an import", imported(linked), 202, None, "unsafe_link", "/etc/passwd"),
    ("5", "zip bomb as a file", file(zip_bomb), 200, "training_file", "invalid_training_file", "ZIP archive"),
    (
        "5",
        "body coded as gzip",
        lambda c, _: refused(upload(c, b"", **{"content-encoding": "gzip"})),
        415,
        None,
        "unsupported_content_encoding",
        "Compressed",
    ),
    (
        "6",
        "zstd bomb as a file",
        file(lambda: zstandard.compress(bytes(256 * MIB))),
        200,
        "training_file",
        "invalid_training_file",
        "compressed",
    ),
    (
        "6",
        "body coded as zstd",
        lambda c, _: refused(
            c.post(CHAT, content=zstandard.compress(bytes(256 * MIB)), headers={"content-encoding": "zstd"})
        ),
        415,
        None,
        "unsupported_content_encoding",
        "Compressed",
    ),
    ("7", "2 GiB, announced", announced_2gib, 413, None, "request_too_large", "The request body is"),
    # The form's reader counts to 24,117,248 bytes, the gateway to 25,165,824 of the body: who is first says it.
    ("7", "one endless line", endless_line, 413, None, "request_too_large", "The request body is"),
    (
        "7",
        "one line of 17 MiB",
        file(lambda: b'{"messages": "' + b"a" * (17 * MIB) + b'"}'),
        200,
        "training_file",
        "invalid_training_file",
        "bytes long",
    ),
    ("8", "JSON 100k deep", chat(f'"tools": {DEEP}'), 400, None, "invalid_json", "parse"),
    (
        "8",
        "JSON 100k deep to a control route",
        body(JOBS, f'{{"model": {DEEP}}}'),
        400,
        None,
        "invalid_json",
        "parse",
    ),
    ("9", "5,000-digit integer", chat('"seed": ' + "9" * 5000), 400, None, "invalid_json", "parse"),
    ("9", "5,000-digit seed of a job", body(JOBS, '{"seed": %s}' % ("9" * 5000)), 400, None, "invalid_json", "JSON"),
    ("10", "lone surrogate", chat('"user": "\\ud800"'), 400, None, "invalid_json", "parse"),
    ("10", "lone surrogate in a job", body(JOBS, '{"suffix": "\\ud800"}'), 400, None, "invalid_json", "JSON"),
    ("11", "temperature NaN", chat('"temperature": NaN'), 400, None, "invalid_json", "parse"),
    ("11", "temperature 1e999", chat('"temperature": 1e999'), 400, None, "invalid_json", "parse"),
    ("12", "n=16384", chat('"n": 16384'), 400, "n", "invalid_value", "<= 64"),
    ("13", "logprobs=1e6", chat('"logprobs": 1e6'), 400, "logprobs", "invalid_type", "`bool"),
    (
        "13",
        "top_logprobs=1e6",
        chat('"logprobs": true, "top_logprobs": 1000000'),
        400,
        "top_logprobs",
        "invalid_value",
        "<= 20",
    ),
    ("13", "max_tokens 0", chat('"max_tokens": 0'), 400, "max_tokens", "invalid_value", ">= 1"),
    ("13", "max_tokens -1", chat('"max_tokens": -1'), 400, "max_tokens", "invalid_value", ">= 1"),
    ("13", "max_tokens 2^63", chat(f'"max_tokens": {1 << 63}'), 400, "max_tokens", "invalid_value", "<= 1048576"),
    (
        "14",
        "chat_template",
        chat('"chat_template": "{{ x }}"'),
        400,
        "chat_template",
        "unsupported_parameter",
        "not accepted",
    ),
    (
        "14",
        "chat_template in its kwargs",
        chat('"chat_template_kwargs": {"chat_template": "{{ x }}"}'),
        400,
        "chat_template_kwargs.chat_template",
        "unsupported_parameter",
        "not accepted",
    ),
    (
        "15",
        "nested loops in a template",
        imported(lambda f: checkpoints.write(f, template=LOOPS)),
        202,
        None,
        "template_refused",
        "CPU",
    ),
    (
        "16",
        "link-local image",
        image("http://169.254.169.254/latest/meta-data"),
        400,
        "image_url",
        "remote_media_refused",
        "fetches nothing",
    ),
    ("16", "image from a file", image("file:///etc/passwd"), 400, "image_url", "remote_media_refused", "no files"),
    ("16", "image with a userinfo trick", image("http://a\\@b"), 400, "image_url", "remote_media_refused", "inline"),
    (
        "17",
        "video",
        media({"type": "video_url", "video_url": {"url": VIDEO}}),
        400,
        "video_url",
        "remote_media_refused",
        "no video",
    ),
    ("18", "pickle renamed", weights(pickle.dumps({"w": [0.0] * 99})), 202, None, "integrity_error", "announces"),
    (
        "18",
        "header of 2^63 bytes",
        weights(header({}, length=1 << 63)),
        202,
        None,
        "integrity_error",
        "9223372036854775808",
    ),
    ("18", "overlapping offsets", weights(header(OVERLAP)), 202, None, "integrity_error", "overlap"),
    ("19", "auto_map", imported(remote_code), 202, None, "remote_code_refused", "auto_map"),
    ("19", "LoRA adapter as a model", imported(adapter), 202, None, "not_a_checkpoint", "config.json"),
    ("20", "upload that stops", slow_upload, 408, None, "request_timeout", "too slowly"),
    ("+", "suffix=<<>>", job(suffix="<<>>"), 400, "suffix", "invalid_value", "with a letter"),
    ("+", "page elsewhere, no key", without_key, 401, None, "missing_api_key", "API key"),
    ("+", "form post with a key", form_post, 400, None, "invalid_body", "application/json"),
]


@pytest.fixture(scope="module")
def neighbours(front: Front) -> Iterator[Neighbours]:
    with Neighbours(front) as asking:
        yield asking
    assert not asking.failed and asking.asked > len(ROWS), (asking.asked, asking.failed[:3])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_bad_input(front: Front, neighbours: Neighbours, row: Any, tmp_path: Path) -> None:
    _, _, send, status, param, code, words = row
    asked = neighbours.asked
    with front.http() as client:
        answer = send(client, tmp_path)
    assert (answer.status, answer.error.get("param"), answer.error.get("code")) == (status, param, code), answer
    assert words in answer.error["message"] and len(answer.error["message"]) < 1000, answer
    front.wait(lambda: neighbours.asked > asked)
    assert not neighbours.failed
    assert front.peak_bytes() < PEAK_BYTES
    assert front.series("buffered_body_bytes")["buffered_body_bytes"] <= 2 * 1024


def test_a_repeated_create_makes_one_job(front: Front) -> None:
    with front.http() as client:
        wanted = {"model": MODEL, "training_file": training_file(client), "suffix": "once"}
        made = [client.post(JOBS, json=wanted, headers={"x-stainless-retry-count": n}).json()["id"] for n in "012"]
    assert len(set(made)) == 1


def test_metadata_that_looks_like_a_formula_is_text_and_stays_so(front: Front) -> None:
    metadata = {"=cmd|'/C calc'!A0": '=HYPERLINK("http://a")', "+1": "@SUM(A1)"}
    with front.http() as client:
        made = client.post(
            JOBS, json={"model": MODEL, "training_file": training_file(client), "metadata": metadata}
        ).raise_for_status()
        assert client.get(f"{JOBS}/{made.json()['id']}").json()["metadata"] == metadata
        assert made.headers["content-type"] == "application/json"


def test_a_revoked_key_ends_its_stream_and_no_other(front: Front, neighbours: Neighbours) -> None:
    with front.http() as admin:
        made = admin.post("/admin/v1/keys", json={"name": "short-lived", "scopes": ["inference"]}).raise_for_status()
        data = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "user": "9999 0.01", "stream": True}

        def knows_key() -> bool:
            return httpx.get(f"{front.url}/v1/models", headers=bearer).status_code == 200

        bearer = {"authorization": f"Bearer {made.json()['key']}"}
        front.wait(knows_key)
        with front.http(made.json()["key"]) as client, client.stream("POST", CHAT, json=data) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            admin.delete(f"/admin/v1/keys/{made.json()['id']}").raise_for_status()
            last = [line for line in lines if line.startswith("data: ")][-1]
        assert json.loads(last[6:])["error"]["code"] == "invalid_api_key"
        front.wait(lambda: front.counts.streaming <= 1)
    assert not neighbours.failed


def test_no_engine_or_gateway_route_but_the_listed_ones(front: Front) -> None:
    """vLLM's own control routes, with the strongest key there is and with none."""
    private = [
        "/pause",
        "/resume",
        "/sleep",
        "/wake_up",
        "/collective_rpc",
        "/update_weights",
        "/v1/load_lora_adapter",
        "/invocations",
        "/tokenize",
        "/docs",
        "/openapi.json",
        "/server_info",
        "/metrics/../pause",
    ]
    answered = front.counts.answered
    with front.http() as keyed, httpx.Client(base_url=front.url) as keyless:
        for path in private:
            for method in ("GET", "POST", "PUT"):
                assert keyed.request(method, path).status_code in (404, 405), path
                assert keyless.request(method, path).status_code in (401, 404, 405), path
        for path in ("/admin/v1/status", "/v1/files", "/metrics", "/v1/models"):
            assert keyless.get(path).status_code == 401
    assert front.counts.answered >= answered


def test_sockets_are_for_their_owner_alone(front: Front) -> None:
    for name in ("c.sock", "bus.sock"):
        assert (front.folder / name).stat().st_mode & 0o777 == 0o600
