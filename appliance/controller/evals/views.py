"""Evaluations, runs and their items as OpenAI's objects (openai 3.52, `types/evals`)."""

from __future__ import annotations

from typing import Any

from appliance.controller.evals.requests import JSONL, sample_of, without_items
from appliance.controller.http.views import whose
from appliance.controller.interfaces.principal import Principal
from appliance.store.rows import EvalItemRow, EvalRow, EvalRunRow

NO_ERROR = {"code": "", "message": ""}
"""The SDK's types have an error in every run and sample; one without has none that says anything."""
_SAMPLE_SCHEMA = {
    "type": "object",
    "properties": {
        "output_text": {"type": "string"},
        "output_json": {},
        "output_tools": {"type": "array", "items": {"type": "object"}},
        "choices": {"type": "array", "items": {"type": "object"}},
    },
}


def eval_object(row: EvalRow, caller: Principal) -> dict[str, Any]:
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
            **(row.kept or {"type": "custom"}),
            "schema": {"type": "object", "properties": properties, "required": list(properties)},
        },
        "testing_criteria": row.criteria,
    } | whose(row, caller)


def run_object(row: EvalRunRow, url: str, caller: Principal, waits_for: str = "") -> dict[str, Any]:
    """Beside OpenAI's fields: `waits_for`, what keeps it from going on, and the mean reward of each criterion."""
    return {
        "id": row.id,
        "object": "eval.run",
        "eval_id": row.eval_id,
        "created_at": int(row.created_s),
        "name": row.name,
        "model": row.model,
        "status": row.status,
        "waits_for": waits_for or None,
        "data_source": without_items(row.data_source),
        "metadata": row.metadata,
        "error": row.error or NO_ERROR,
        "report_url": f"{url}/evals/{row.eval_id}/runs/{row.id}/output_items",
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
    } | whose(row, caller)


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
    # What the data has may have any shape; what a model was asked has the runner's.
    asked = (row.sample or {}) if run.data_source.get("type") != JSONL and run.model else {}
    answer = asked.get("answer") or {}
    sampling = run.data_source.get("sampling_params") or {}
    text = answer.get("text") if asked else sample_of(row.sample).output_text or None
    prompt, completion = answer.get("prompt_tokens", 0), answer.get("completion_tokens", 0)
    failed = answer.get("error")
    return {
        "input": [
            {"role": str(message.get("role", "")), "content": _text(message.get("content"))}
            for message in asked.get("input", [])
        ],
        "output": [] if text is None else [{"role": "assistant", "content": _text(text)}],
        "finish_reason": answer.get("finish_reason", ""),
        "model": run.model,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "cached_tokens": answer.get("cached_tokens", 0),
            "total_tokens": prompt + completion,
        },
        "error": {"code": "sample_failed", "message": failed} if failed else NO_ERROR,
        "max_completion_tokens": sampling.get("max_completion_tokens") or sampling.get("max_completions_tokens") or 0,
        "temperature": sampling.get("temperature") if sampling.get("temperature") is not None else 1.0,
        "top_p": sampling.get("top_p") or 1.0,
        "seed": sampling.get("seed") or 0,
    }


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "" if content is None else str(content)
