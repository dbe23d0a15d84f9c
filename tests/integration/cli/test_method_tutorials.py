"""Each method has a page whose commands and program a box takes, on the data that the page shows."""

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
    """Files by name: the rows that the page shows, numbered so that there are enough of them and none twice."""
    blocks = re.findall(r"```json\n(.*?)```", page, re.S)
    rows = [json.loads(line) for block in blocks for line in block.splitlines() if line.startswith('{"')]
    if not rows:  # distillation has the prompts of rewards, and a teacher's answers
        answered = shown_data(page_of("supervised"))["train.jsonl"]
        return shown_data(page_of("reinforcement")) | {"train.jsonl": answered}

    def lines(first: int) -> bytes:
        numbers = range(first, first + 12)
        return "".join(json.dumps(numbered(row, number)) + "\n" for number in numbers for row in rows).encode()

    files = {**dict.fromkeys(("train.jsonl", "pairs.jsonl", "prompts.jsonl"), lines(0)), "held-out.jsonl": lines(12)}
    grader = next((block.encode() for block in blocks if block.startswith("{\n")), b"")
    return {**files, "grader.json": grader}


def numbered(row: Any, number: int) -> Any:
    """Each question with a number behind it."""
    text = json.dumps(row)
    return json.loads(re.sub(r"\?", f"? ({number})", text))


@pytest.fixture
def trained(box: ControlledBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked_here: None) -> ControlledBox:
    """A box with the models that pages name, completions that one of them made, and engines that answer anything."""
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
def test_what_the_page_of_a_method_says_is_taken_by_the_box(trained: ControlledBox, tmp_path: Path, method: str):
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
