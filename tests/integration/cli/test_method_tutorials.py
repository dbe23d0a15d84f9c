"""The commands and the program of each method's tutorial page run on a box with the data of the page."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from appliance.controller.bus.asking import EngineAnswer
from appliance.controller.responses.objects import completion_row
from appliance.store import jobs, models
from appliance.store.rows import RESPONSES
from tests.simulator.control_plane import SimulatedEngines
from tests.train_support.tiny import tokenizer
from tests.unit.cli.conftest import ControlledBox
from tests.unit.controller.conftest import insert_model
from tests.unit.controller.test_responses import completion
from train.methods.methods import METHODS

DOCS = Path(__file__).parents[3] / "docs"
SECTIONS = {"supervised": ("first-model.md", "## 3. Teach it")}
"""Page and headline, where a method has no page of its own name."""
MODELS = ("smollm2-135m", "small", "large", "boxer")
NEED_AN_ENGINE = ("chat",)


def page_of(method: str) -> str:
    name, headline = SECTIONS.get(method, (f"{method}.md", ""))
    text = (DOCS / name).read_text()
    return text.partition(headline)[2].partition("\n## ")[0] if headline else text


def shown_data(page: str) -> dict[str, bytes]:
    """Files by name with the rows of the page, repeated with numbers to get enough distinct rows."""
    blocks = re.findall(r"```json\n(.*?)```", page, re.S)
    rows = [json.loads(line) for block in blocks for line in block.splitlines() if line.startswith('{"')]
    if not rows:  # distillation uses the reinforcement prompts and a teacher's answers
        answered = shown_data(page_of("supervised"))["train.jsonl"]
        return shown_data(page_of("reinforcement")) | {"train.jsonl": answered}

    def lines(first: int) -> bytes:
        numbers = range(first, first + 12)
        return "".join(json.dumps(numbered(row, number)) + "\n" for number in numbers for row in rows).encode()

    files = {**dict.fromkeys(("train.jsonl", "pairs.jsonl", "prompts.jsonl"), lines(0)), "held-out.jsonl": lines(12)}
    grader = next((block.encode() for block in blocks if block.startswith("{\n")), b"")
    return {**files, "grader.json": grader}


def numbered(row: Any, number: int) -> Any:
    """Append a number to each question."""
    text = json.dumps(row)
    return json.loads(re.sub(r"\?", f"? ({number})", text))


@pytest.fixture
def trained(box: ControlledBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked_here: None) -> ControlledBox:
    """A box with the models of the pages, stored completions of one model, and engines that answer every request."""
    monkeypatch.chdir(tmp_path)
    tokenizer().save_pretrained(tmp_path / "model")

    def insert() -> None:
        for name in MODELS:
            insert_model(box.context.db, name)
            models.update_version(box.context.db, name, "v1", disk_path=str(tmp_path / "model"))
        for number in range(12):
            kept = completion(f"chatcmpl-{number}", model="large", metadata={"rated": "good"})
            asked = {**kept["input"], "messages": [{"role": "user", "content": f"{number}?"}]}
            RESPONSES.insert(box.context.db, completion_row("", "", asked, kept["response"]))

    async def rule(body: dict[str, Any]) -> EngineAnswer:
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "A"}}
        return EngineAnswer(200, {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})

    box.do(insert)
    engines = box.context.asking
    assert isinstance(engines, SimulatedEngines)
    engines.rule = rule
    return box


@pytest.mark.parametrize("method", METHODS)
def test_tutorial_page_commands_and_program_succeed(trained: ControlledBox, tmp_path: Path, method: str):
    page = page_of(method)
    for name, content in shown_data(page).items():
        (tmp_path / name).write_bytes(content)
    commands = [shlex.split(line, comments=True)[1:] for line in re.findall(r"^appliance .*$", page, re.M)]
    for words in commands:
        if words[0] in NEED_AN_ENGINE:
            continue
        done = trained.run(*(word for word in words if word != "--wait"))
        assert done.exit_code == 0, (words, done.output)
    (program,) = re.findall(r"```python\n(.*?)```", page, re.S)
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(trained.data_dir / "controller.sock"))) as http:
        found = {"client": openai.OpenAI(base_url="http://box/v1", api_key="ignored here", http_client=http)}
        exec(program, found)
    trained.settle()
    made = trained.do(lambda: jobs.page(trained.context.db, viewer=None, after=None, limit=20).data)
    assert [one.reason for one in made if one.phase != "queued"] == []
    assert [one.method for one in made].count(method) >= 2, "one by a command, one by the program"
    assert found["job"].method.type == method
