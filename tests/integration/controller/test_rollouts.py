"""Sample files of a job: sampled from its newest weights through the gateway with its key, and graded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from appliance.controller.bus.asking import EngineAnswer
from appliance.controller.grading.judging import samples_of, sampling_request, scores_of
from appliance.controller.grading.rollouts import Rollouts
from appliance.store import jobs, keys
from tests.integration.controller.test_jobs import prompts, rewarded
from tests.simulator.control_plane import judging_of
from tests.train_support.specs import host_spec
from tests.unit.controller.conftest import Control
from train.data.token_set import tokens_of
from train.graders.grading import Graded
from train.graders.sandbox import GraderHosts
from train.rollouts.samples import Samples, SamplesFile
from weights.format.layout import Layout, TensorSpec
from weights.format.names import policy_name, version_name
from weights.memory.store import WeightStore

OPTIONS = {"group": 9, "rows": 1, "max_completion_tokens": 4, "eval_samples": 1}
LAYOUT = Layout.plan([TensorSpec("a", "F32", (2,))], stem="adapter_model")


class Routing:
    def __init__(self) -> None:
        self.offered: list[tuple[str, str, str, str]] = []

    async def offer_policy(self, *policy: str) -> None:
        self.offered.append(policy)


async def written(body: dict[str, Any]) -> EngineAnswer:
    """Completions in reverse order: choice i is the token 10 + (seed + i) % 7, with text of that many letters."""
    numbers = [(body["seed"] + i) % 7 for i in range(body["n"])]
    choices = [
        {"index": i, "token_ids": [10 + number], "logprobs": {"token_logprobs": [-1.0]}, "text": "a" * number}
        for i, number in enumerate(numbers)
    ]
    return EngineAnswer(200, {"choices": choices[::-1]})


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Texts of each grading call; the reward is the length of a text."""
    calls = list[list[str]]()

    async def grade(hosts: Any, owner: str, grader: Any, samples: list[Any], *rest: Any) -> list[Graded]:
        calls.append([sample.output_text for sample, _ in samples])
        await asyncio.sleep(0.01)
        return [Graded(len(sample.output_text), True) for sample, _ in samples]

    monkeypatch.setattr(GraderHosts, "grade", grade)
    return calls


class Run:
    """A job of four prompts, two per step, with the files that its ranks would write."""

    def __init__(self, control: Control, job_id: str, folder: Path):
        self.control, self.job_id, self.folder = control, job_id, folder / job_id
        self.store, self.routing = WeightStore(folder / "shm", budget_bytes=None), Routing()
        context = control.context
        self.rollouts = Rollouts(
            control.db,
            self.store,
            folder,
            self.routing,
            context.asking,
            judging_of(context),
            lambda: None,  # type: ignore[arg-type]
        )
        control.engines.rule = written

    def begin(self, policy: str = "adapter", staleness: int = 0, **fields: Any) -> None:
        self.folder.mkdir(parents=True)
        lines = [json.dumps({"messages": [], "item": {"answer": str(n)}, "tools": []}) for n in range(4)]
        (self.folder / "train.jsonl").write_text("\n".join(lines) + "\n")
        tokens = tokens_of(self.folder / "train.jsonl")
        tokens.mkdir(parents=True)
        np.arange(8, dtype=np.int32).tofile(tokens / "tokens")
        np.save(tokens / "offsets.npy", np.arange(0, 9, 2))
        spec = host_spec(
            job_id=self.job_id,
            method="reinforcement",
            train_path=str(self.folder / "train.jsonl"),
            run_dir=str(self.folder),
            base_model="starter",
            base_version="v1",
            batch_size=2,
            micro_batch=1,
            packing=False,
            options={**OPTIONS, "policy": policy, "staleness": staleness},
            **fields,
        )
        (self.folder / "spec.json").write_text(spec.to_json())
        np.zeros(8, bool).tofile(tokens / "learnt")
        facts = {"ends": [2], "pad_id": 0, "n_records": 4, "documents": False, "digest": ""}
        (tokens / "facts.json").write_text(json.dumps(facts))

    def publish(self, step: int, kind: str = "adapter") -> None:
        name = policy_name(self.job_id)
        with self.store.reserve(LAYOUT, kind=kind, model=name, version=version_name(step)) as draft:
            draft.commit(meta={})
        self.rollouts.published(self.job_id, step)

    async def file(self, step: int) -> Samples:
        path = SamplesFile("train", step).path(self.folder)
        async with asyncio.timeout(20):
            while (samples := Samples.read(path)) is None:
                await asyncio.sleep(0.01)
        return samples

    @property
    def starved(self) -> bool:
        return self.rollouts.starved(jobs.get(self.control.db, self.job_id))

    def close(self) -> None:
        for task in self.rollouts._followed.values():
            task.cancel()


@pytest.fixture
async def run(control: Control, tmp_path: Path) -> AsyncIterator[Run]:
    control.as_key("ann", owner="ann")
    job_id = await control.job(training_file=await control.upload(prompts()), method=rewarded())
    run = Run(control, job_id, tmp_path / "runs")
    yield run
    run.close()


@pytest.mark.parametrize(("kind", "asked", "engines"), [("adapter", "@step-0", ""), ("version", "", "step-0")])
async def test_samples_use_newest_weights_and_are_graded_in_order(
    run: Run, judged, kind: str, asked: str, engines: str
):
    """A policy with full weights has its own engines."""
    run.begin(kind)
    run.publish(0, kind)
    samples = await run.file(0)
    name, sent = policy_name(run.job_id), run.control.engines.sent
    assert {body["model"] for body in sent} == {f"{name}{asked}"} and len({body["seed"] for body in sent}) == 4
    assert sorted(body["n"] for body in sent) == [1, 1, 8, 8] and all(body["stop_token_ids"] == [2] for body in sent)
    assert run.routing.offered == [(name, "starter", "v1", engines)]
    assert len(samples.ids) == 18 and samples.weights_step == 0 and not samples.failed
    assert samples.verdict["rewards"] == [int(ids[0]) - 10 for ids in samples.ids]
    while run.starved:
        await asyncio.sleep(0)


async def test_samples_are_drawn_once_and_wait_for_next_weights(run: Run, judged):
    run.begin()
    run.publish(0)
    await run.file(0)
    sent = len(run.control.engines.sent)
    run.rollouts.follow()
    await asyncio.sleep(0.05)
    assert len(run.control.engines.sent) == sent
    run.publish(1)
    assert (await run.file(1)).weights_step == 1


async def test_samples_are_redrawn_whole_after_controller_death(run: Run, judged):
    run.begin()
    run.control.engines.lines = 0
    run.publish(0)
    async with asyncio.timeout(20):
        while not run.starved:
            await asyncio.sleep(0.01)
    run.close()
    again = Run(run.control, run.job_id, run.folder.parent)
    run.control.engines.lines = 4
    again.rollouts.follow()
    assert len((await again.file(0)).ids) == 18
    again.close()


@pytest.mark.parametrize("how", ["refused", "revoked"])
async def test_samples_record_reason_if_sampling_fails(run: Run, judged, how: str):
    async def refused(body: dict[str, Any]) -> EngineAnswer:
        return EngineAnswer(400, {"error": {"message": "too long"}})

    if how == "refused":
        run.control.engines.rule = refused
    else:
        row = jobs.get(run.control.db, run.job_id)
        assert row.key_id is not None
        keys.revoke(run.control.db, row.key_id)
    run.begin()
    run.publish(0)
    samples = await run.file(0)
    assert ("too long" if how == "refused" else "revoked") in samples.failed and samples.ids == []


# --- requests in token ids


def choice(index, ids, log_probs, text="x"):
    return {"index": index, "token_ids": ids, "logprobs": {"token_logprobs": log_probs}, "text": text}


def test_samples_of_answers_are_sorted_by_index():
    body = {"choices": [choice(1, [5], [-0.5], "b"), choice(0, [3, 2], [-1.0, -2.0], "a")]}
    assert samples_of(body, 2) == [([3, 2], [-1.0, -2.0], "a"), ([5], [-0.5], "b")]
    with pytest.raises(ValueError):
        samples_of({"choices": [choice(0, [3], [-1.0]), choice(1, [3], [-9999.0])]}, 2)


@pytest.mark.parametrize("odd", [{"logprobs": None}, {"logprobs": {}}, {"token_ids": None}, {"index": None}])
def test_samples_of_incomplete_answers_explain_error(odd):
    with pytest.raises(ValueError):
        samples_of({"choices": [choice(0, [3], [-1.0]), choice(1, [3], [-1.0]) | odd]}, 2)


@pytest.mark.parametrize("places", [None, [], [None], [{}], [{"3": None}], [{"3": {"logprob": None}}]])
def test_scores_of_incomplete_answers_explain_error(places):
    with pytest.raises(ValueError):
        scores_of({"choices": [{"prompt_logprobs": places}]}, [1, 3], 1)


def test_sampling_request_ignores_default_sampling_settings():
    asked = CompletionRequest.model_validate(
        sampling_request("m@1", [1, 2], n=2, seed=9, max_tokens=5, ends=[2]), strict=False
    )
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    params = asked.to_sampling_params(5, defaults)
    assert (params.n, params.seed, params.max_tokens, params.logprobs) == (2, 9, 5, 0)
    assert (params.temperature, params.top_p, params.min_p, params.repetition_penalty) == (1.0, 1.0, 0.0, 1.0)
    assert params.top_k in (0, -1) and params.all_stop_token_ids == {2} and asked.return_token_ids
