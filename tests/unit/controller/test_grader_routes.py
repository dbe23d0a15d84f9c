"""Graders through the unchanged SDK: checked, tried on a sample, with the box's models as judges."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from appliance.controller.bus.asking import EngineAnswer
from tests.simulator.control_plane import LineReturned
from tests.unit.controller.conftest import Control
from tests.unit.controller.test_evals import CHECK
from train.graders import worker

JUDGE: Any = {
    "type": "score_model",
    "name": "judge",
    "model": "starter",
    "input": [{"role": "user", "content": "{{item.q}}: {{sample.output_text}}"}],
}


def judged(control: Control, *answers: str | EngineAnswer | LineReturned) -> list[dict[str, Any]]:
    """The engine answers like this; returns the bodies that it was sent."""
    left, sent = list(answers), []

    async def rule(body: dict[str, Any]) -> EngineAnswer:
        sent.append(body)
        given = left.pop(0)
        if isinstance(given, LineReturned):
            raise given
        if isinstance(given, EngineAnswer):
            return given
        choice = {"index": 0, "message": {"role": "assistant", "content": given}}
        used = {"prompt_tokens": 20, "completion_tokens": 9, "total_tokens": 29}
        return EngineAnswer(200, {"choices": [choice], "usage": used})

    control.engines.rule = rule
    return sent


async def test_a_grader_is_tried_on_a_sample(control: Control):
    found = await control.sdk.fine_tuning.alpha.graders.run(grader=CHECK, model_sample="4", item={"answer": "4"})
    assert found.reward == 1.0 and found.sub_rewards == {} and found.metadata.scores == {"same": 1.0}
    assert (found.metadata.name, found.metadata.type, found.metadata.token_usage) == ("same", "string_check", None)
    assert found.metadata.execution_time >= 0 and not found.metadata.errors.other_error


async def test_a_grader_is_checked_and_told_back(control: Control):
    told = await control.sdk.fine_tuning.alpha.graders.validate(grader=CHECK)
    assert told.grader is not None and told.grader.model_dump(exclude_unset=True) == CHECK
    with pytest.raises(openai.BadRequestError) as caught:
        await control.sdk.fine_tuning.alpha.graders.validate(grader={**CHECK, "operation": "equals"})
    assert (caught.value.param, caught.value.code) == ("grader.operation", "invalid_grader")


@pytest.mark.skipif(bool(worker.refusal()), reason="no sandbox for code")
@pytest.mark.parametrize(
    "source", ["def grade(sample, item)\n    return 1", "import rdkit\ndef grade(sample, item):\n    return 1"]
)
async def test_code_that_cannot_grade_is_refused(control: Control, source: str):
    bad: Any = {"type": "python", "name": "p", "source": source}
    both: Any = {"type": "multi", "name": "m", "calculate_output": "p", "graders": {"p": bad}}
    for grader, param in ((bad, "grader.source"), (both, "grader.graders.p.source")):
        with pytest.raises(openai.BadRequestError) as caught:
            await control.sdk.fine_tuning.alpha.graders.validate(grader=grader)
        assert (caught.value.param, caught.value.code) == (param, "invalid_grader")


async def test_code_runs_in_the_sandbox_or_is_refused_at_once(control: Control, monkeypatch: pytest.MonkeyPatch):
    python: Any = {
        "type": "python",
        "name": "length",
        "source": "def grade(sample, item):\n    return len(sample['output_text'])",
    }
    if not worker.refusal():
        assert (await control.sdk.fine_tuning.alpha.graders.run(grader=python, model_sample="four")).reward == 4
        broken = {**python, "source": "def grade(sample, item):\n    return item['n']"}
        found = await control.sdk.fine_tuning.alpha.graders.run(grader=broken, model_sample="", item={})
        assert found.metadata.errors.python_grader_runtime_error
        assert found.metadata.errors.python_grader_runtime_error_details == "KeyError: 'n' (line 2)"
    monkeypatch.setattr(worker, "missing", lambda: "the kernel offers no Landlock")
    with pytest.raises(openai.BadRequestError) as caught:
        await control.sdk.fine_tuning.alpha.graders.validate(grader=python)
    assert caught.value.code == "python_graders_unavailable" and "no Landlock" in caught.value.message


async def test_a_model_of_the_box_judges_and_is_asked_for_the_key(control: Control):
    key_id = control.as_key("carol")
    sent = judged(control, json.dumps({"reason": "close", "result": 0.75}))
    found = await control.sdk.fine_tuning.alpha.graders.run(grader=JUDGE, model_sample="4", item={"q": "2+2"})
    assert found.reward == 0.75 and found.metadata.token_usage == 29
    assert found.metadata.sampled_model_name == "starter"
    assert found.api_model_grader_token_usage_per_model == {"starter": {"total_tokens": 29}}
    assert sent[0]["messages"] == [{"role": "user", "content": "2+2: 4"}] and "structured_outputs" in sent[0]
    assert list(control.engines.models) == [] and control.engines.asked_by == [key_id]
