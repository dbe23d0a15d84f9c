"""Exit codes and messages of failing commands, and how commands find their box."""

import os
import socket
import threading

import pytest

from tests.unit.cli.conftest import openai_error, run, write_box_file


@pytest.mark.parametrize(
    ("status", "code", "exit_code"),
    [
        (400, "invalid_value", 2),
        (401, "invalid_api_key", 4),
        (403, "insufficient_permissions", 4),
        (404, "model_not_found", 3),
        (409, "model_in_use", 5),
        (500, None, 1),
        (503, "controller_unavailable", 6),
        (504, "wait_timeout", 124),
    ],
)
def test_http_status_sets_exit_code(prepared, status, code, exit_code):
    prepared.prepare("DELETE", "/v1/models/ft%3Astarter%3Alocal%2Fx", (status, openai_error("because", code)))
    result = prepared.run("model", "rm", "ft:starter:local/x")
    assert (result.exit_code, result.stdout, result.stderr) == (exit_code, "", "error: because\n")


def test_answer_without_an_error_object_fails(prepared):
    prepared.prepare("GET", "/admin/v1/devices", (500, b"<html>oops"))
    assert "answered 500" in prepared.run("gpu", "list").stderr
    prepared.prepare("GET", "/admin/v1/devices", (200, b"<html>hello"))
    wrong = prepared.run("gpu", "list")
    assert wrong.exit_code == 1 and "the URL is not an appliance's" in wrong.stderr


def test_unreachable_box_exits_with_6():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        result = run("status", "--url", f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert result.exit_code == 6 and "cannot reach the box" in result.stderr


def test_url_is_accepted_with_or_without_v1(prepared):
    prepared.prepare("GET", "/admin/v1/devices", (200, {"data": []}))
    port = prepared.url.rpartition(":")[2]
    for url in (f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port}/v1", f"127.0.0.1:{port}/v1/"):
        assert run("gpu", "list", "--url", url).exit_code == 0
    for url in ("ftp://x", "http://", "http://x:y", "http://x/other"):
        assert run("status", "--url", url).exit_code == 2


def test_client_sends_the_key(prepared, monkeypatch):
    prepared.prepare("GET", "/admin/v1/devices", (200, {"data": []}))
    prepared.run("gpu", "list", "--api-key", "sk-1")
    monkeypatch.setenv("APPLIANCE_API_KEY", "sk-2")
    prepared.run("gpu", "list")
    assert [r["headers"]["authorization"] for r in prepared.requests] == ["Bearer sk-1", "Bearer sk-2"]


def test_box_is_chosen_by_options_before_variables(prepared, monkeypatch, tmp_path, main_process):
    """Options override variables; APPLIANCE_URL overrides other variables; two box options conflict."""
    prepared.prepare("GET", "/admin/v1/devices", (200, {"data": []}))
    write_box_file(tmp_path / "box", pid=main_process.pid, state="ready", controller_socket=str(prepared.socket_path))
    here = str(tmp_path / "box")
    assert run("gpu", "list", "--data-dir", here).exit_code == 0
    assert run("--data-dir", here, "gpu", "list").exit_code == 0
    assert run(f"--data-dir={here}", "gpu", "list").exit_code == 0
    assert run("gpu", "list", "--data-dir", here, "--url", prepared.url).exit_code == 2
    monkeypatch.setenv("APPLIANCE_URL", "http://127.0.0.1:1")
    assert run("gpu", "list").exit_code == 6
    assert run("gpu", "list", "--data-dir", here).exit_code == 0
    monkeypatch.setenv("APPLIANCE_DATA_DIR", here)
    assert run("gpu", "list").exit_code == 6
    monkeypatch.delenv("APPLIANCE_URL")
    assert run("gpu", "list").exit_code == 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (None, "no box on"),
        ({"state": "stopped", "pid": None}, "does not run; "),
        ({"state": "stopped", "pid": None, "message": "the disk was full"}, "it ended: the disk was full"),
        ({"state": "failed", "pid": None, "message": "port 8000 is taken"}, "did not start: port 8000 is taken"),
        ({"state": "ready", "pid": 2**22 + 1}, "was killed while ready"),
        ({"state": "ready", "pid": 2**22 + 1, "url": "http://127.0.0.1:8000/v1"}, "box` starts it and continues"),
        ({"state": "ready", "pid": os.getpid()}, "was killed while ready"),  # another process has the pid now
    ],
)
def test_stopped_box_is_reported_with_reason(tmp_path, fields, said):
    if fields is not None:
        write_box_file(tmp_path / "box", **fields)
    result = run("status", "--data-dir", str(tmp_path / "box"))
    assert result.exit_code == 6 and said in result.stderr


@pytest.mark.parametrize("state", ["stopping", "starting"])
def test_box_that_refuses_connections_is_reported_with_state(tmp_path, main_process, state):
    path = tmp_path / "closed.sock"
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind(str(path))
    fields = {"pid": main_process.pid, "controller_socket": str(path)}
    write_box_file(tmp_path / "box", state=state, message="suspending jobs", **fields)
    result = run("job", "list", "--data-dir", str(tmp_path / "box"))
    assert result.exit_code == 6 and f"is {state}: suspending jobs" in result.stderr
    assert "refused" not in result.stderr
    write_box_file(tmp_path / "box", state="ready", **fields)
    assert "Connection refused" in run("job", "list", "--data-dir", str(tmp_path / "box")).stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("mode", "set", "split", "--train", "many"),
        ("mode", "set", "sometimes"),
        ("job", "submit", "--model", "m", "--file", "no-such-file.jsonl"),
        ("job", "submit", "--model", "m", "--file", "file-1", "--set", "lora_alpha"),
        ("job", "submit", "--model", "m", "--file", "file-1", "--epochs", "1", "--set", "n_epochs=2"),
        *(("model", "canary", "m", *given) for given in (("--share", "20%"), ("--for", "10m"), ("--auto",))),
        ("gpu", "list", "-o", "yaml"),
        ("chat", "m", "  "),
    ],
)
def test_usage_errors_exit_2(prepared, arguments):
    result = prepared.run(*arguments)
    assert result.exit_code == 2 and result.stderr and not prepared.requests


def test_interrupted_download_leaves_no_file(tmp_path):
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for answer in (b'{"id": "file-1", "object": "file"}', b"half"):
            with listener.accept()[0] as client:
                client.recv(65536)
                length = 10 if answer == b"half" else len(answer)
                client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (length, answer))

    serving = threading.Thread(target=serve)
    serving.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    result = run("file", "get", "file-1", "--save", str(tmp_path / "x"), "--url", url)
    serving.join()
    listener.close()
    assert result.exit_code == 1 and "the answer was cut off" in result.stderr
