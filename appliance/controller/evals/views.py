"""Evaluations, runs and their items as OpenAI's objects (openai 3.52, `types/evals`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from appliance.controller.evals.requests import JSONL, sample_of, without_items
from appliance.store.rows import EvalItemRow, EvalRow, EvalRunRow, columns
from train.graders.grading import ModelAnswer

NO_ERROR = {"code": "", "message": ""}
"""The SDK's types have an error in every run and sample; without a failure, it is empty."""
_SAMPLE_SCHEMA = {
    "type": "object",
    "properties": {
        "output_text": {"type": "string"},
        "output_json": {},
        "output_tools": {"type": "array", "items": {"type": "object"}},
        "choices": {"type": "array", "items": {"type": "object"}},
    },
}


def eval_object(row: EvalRow) -> dict[str, Any]:
    properties: dict[str, Any] = {"item": row.item_schema}
    if row.include_sample:
        properties["sample"] = _SAMPLE_SCHEMA
    return {
        "id": row.id,
        "object": "eval",
        "created_at": int(row.created_s),
        "name": row.name,
        "metadata": row.metadata,
        "data_source_config": {
            "type": "custom",
            "schema": {"type": "object", "properties": properties, "required": list(properties)},
        },
        "testing_criteria": row.criteria,
        "owner": row.owner or None,
    }


def run_object(row: EvalRunRow, url: str, waits_for: str = "") -> dict[str, Any]:
    """In addition to OpenAI's fields: `waits_for`, why it does not proceed, and the mean reward of each criterion."""
    return {
        "id": row.id,
        "object": "eval.run",
        "created_at": int(row.created_s),
        **columns(row, "eval_id name model status metadata"),
        "waits_for": waits_for or None,
        "data_source": without_items(row.data_source),
        "error": row.error or NO_ERROR,
        # The page asks for a key; a browser has no key to open the API's own URL with.
        "report_url": f"{url}/ui#/evals/{row.eval_id}/{row.id}",
        "result_counts": {
            "total": row.total,
            "passed": row.counts.get("pass", 0),
            "failed": row.counts.get("fail", 0),
            "errored": row.counts.get("error", 0),
        },
        "per_testing_criteria_results": [
            {
                "testing_criteria": name,
                "passed": of.get("passed", 0),
                "failed": of.get("failed", 0),
                "mean_reward": of["reward"] / of["rewarded"] if of.get("rewarded") else None,
            }
            for name, of in row.results.items()
        ],
        "per_model_usage": [
            {
                "model_name": model,
                "invocation_count": of.get("invocation_count", 0),
                "prompt_tokens": of.get("prompt_tokens", 0),
                "completion_tokens": of.get("completion_tokens", 0),
                "cached_tokens": of.get("cached_tokens", 0),
                "total_tokens": of.get("prompt_tokens", 0) + of.get("completion_tokens", 0),
            }
            for model, of in row.usage.items()
        ],
        "owner": row.owner or None,
    }


def item_object(row: EvalItemRow, run: EvalRunRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "object": "eval.run.output_item",
        "eval_id": run.eval_id,
        "run_id": run.id,
        "created_at": int(row.created_s),
        "datasource_item_id": row.place,
        "datasource_item": row.item,
        "status": row.status,
        "results": row.results or [],
        "sample": _sample(row, run),
    }


def _sample(row: EvalItemRow, run: EvalRunRow) -> dict[str, Any]:
    if run.data_source.get("type") == JSONL or not run.model:  # the data has it, in any shape
        text = sample_of(row.sample).output_text
        return _shown(run.model, [], [{"text": text}] if text else [], None)
    sample = row.sample or {}
    answer, sampling = sample.get("answer") or {}, run.data_source.get("sampling_params") or {}
    return _shown(run.model, sample.get("input", []), [answer], sampling)


def judges_sample(body: dict[str, Any], answers: Sequence[ModelAnswer]) -> dict[str, Any]:
    """The answers of models that a grader asked, in the form of an item's sample. body: the chat completion request to
    the first of them."""
    return _shown(answers[0].model, body["messages"], [asdict(answer) for answer in answers], body)


def _shown(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    answers: Sequence[Mapping[str, Any]],
    sampling: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """answers: as `ModelAnswer` has them. sampling: None where no model was asked; the SDK's types have no null."""
    given, asked = sampling or {}, sampling is not None
    used = {name: sum(one.get(f"{name}_tokens", 0) for one in answers) for name in ("prompt", "completion", "cached")}
    why = next((one["error"] for one in answers if one.get("error")), None)
    temperature = given.get("temperature")
    return {
        "input": [{"role": str(one.get("role", "")), "content": _text(one.get("content"))} for one in messages],
        "output": [{"role": "assistant", "content": one["text"]} for one in answers if "text" in one],
        "model": model,
        "usage": {
            **{f"{name}_tokens": number for name, number in used.items()},
            "total_tokens": used["prompt"] + used["completion"],
        },
        "error": {"code": "sample_failed", "message": why} if why else NO_ERROR,
        "finish_reason": answers[0].get("finish_reason") or "" if asked and answers else "",
        "max_completion_tokens": given.get("max_completion_tokens") or given.get("max_completions_tokens") or 0,
        "temperature": 1.0 * asked if temperature is None else temperature,
        "top_p": given.get("top_p") or 1.0 * asked,
        "seed": given.get("seed") or 0,
    }


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "" if content is None else str(content)
