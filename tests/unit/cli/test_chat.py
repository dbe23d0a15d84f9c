"""`appliance chat`: streaming, JSON output, conversations, and use without a key on the box."""

import json

import pytest

from tests.unit.cli.conftest import openai_error, run, write_box_file

CHAT = "/v1/chat/completions"


def sse(*pieces: str, done: bool = True) -> bytes:
    events = [json.dumps({"choices": [{"delta": {"content": piece}}]}) for piece in pieces]
    lines = [": keep-alive", *(f"data: {event}" for event in events), *(["data: [DONE]"] if done else [])]
    return "".join(f"{line}\n\n" for line in lines).encode()


def test_chat_with_one_question_streams_answer(prepared):
    prepared.prepare("POST", CHAT, (200, sse("Hel", "lo", "\x1b[2J!")))
    result = prepared.run("chat", "starter", "Hi", "--system", "Be kind.", "--max-tokens", "5", "--temperature", "0")
    assert (result.exit_code, result.stdout) == (0, "Hello[2J!\n")
    assert json.loads(prepared.requests[0]["content"]) == {
        "model": "starter",
        "max_tokens": 5,
        "temperature": 0.0,
        "stream": True,
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
    }


def test_chat_removes_line_separators_from_answer(prepared):
    event = json.dumps({"choices": [{"delta": {"content": "a\u2028b"}}]}, ensure_ascii=False)
    prepared.prepare("POST", CHAT, (200, f"data: {event}\n\n".encode() + sse()))
    assert prepared.run("chat", "starter", "Hi").stdout == "ab\n", "which a terminal would obey"


BOUND = json.dumps({"choices": [{"delta": {"content": "Hel"}, "finish_reason": "length"}]})
ERROR = json.dumps(openai_error("the engine died"))


@pytest.mark.parametrize(
    ("answer", "exit_code", "shown", "told"),
    [
        (sse(""), 0, "\n", "ended its answer at once"),
        (f"data: {BOUND}\n\n".encode() + sse(), 0, "Hel\n", "cut off: 1 tokens, see --max-tokens"),
        (sse("Hel", done=False), 1, "Hel\n", "cut off"),
        (sse("Hel", done=False) + f"data: {ERROR}\n\n".encode(), 1, "Hel\n", "the engine died"),
    ],
    ids=["empty", "at its bound", "cut off", "error"],
)
def test_chat_reports_an_incomplete_answer(prepared, answer, exit_code, shown, told):
    prepared.prepare("POST", CHAT, (200, answer))
    result = prepared.run("chat", "starter", "Hi", "--max-tokens", "1")
    assert (result.exit_code, result.stdout) == (exit_code, shown) and told in result.stderr


def test_chat_with_unknown_model_prints_only_error(prepared):
    prepared.prepare("POST", CHAT, (404, openai_error("no such model")))
    result = prepared.run("chat", "nobody", "Hi")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "", "error: no such model\n")


def test_chat_reads_a_prompt_from_a_pipe(prepared):
    prepared.prepare("POST", CHAT, (200, sse("ok")))
    assert prepared.run("chat", "starter", input="What?\n").stdout == "ok\n"
    assert json.loads(prepared.requests[0]["content"])["messages"] == [{"role": "user", "content": "What?\n"}]


def test_chat_json_prints_whole_completion(prepared):
    prepared.prepare("POST", CHAT, (200, {"choices": [{"message": {"content": "ok"}}]}))
    result = prepared.run("chat", "starter", "Hi", "-o", "json")
    assert json.loads(result.stdout)["choices"][0]["message"]["content"] == "ok"
    assert "stream" not in json.loads(prepared.requests[0]["content"])


def test_chat_on_the_box_needs_no_key(prepared, tmp_path, main_process):
    (tmp_path / "asking.sock").symlink_to(prepared.socket_path)
    served = {"url": "http://127.0.0.1:9", "controller_socket": str(tmp_path / "controller.sock")}
    write_box_file(tmp_path / "box", pid=main_process.pid, state="ready", **served)
    prepared.prepare("POST", CHAT, (200, sse("ok")))
    assert run("chat", "starter", "Hi", "--data-dir", str(tmp_path / "box")).stdout == "ok\n"
    assert [(r["method"], r["path"]) for r in prepared.requests] == [("POST", CHAT)]
    assert "authorization" not in prepared.requests[0]["headers"]
