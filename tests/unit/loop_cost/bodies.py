"""Bodies that routes take, beside those in asked.py: each kind of grader, method, data source and file once, for what a
schema says nothing of. `{unique}` is another text in each request."""

from __future__ import annotations

from typing import Any

from tests.unit.loop_cost.fill import CRITERION, MODEL

Route = tuple[str, str]

_SCORE = {
    "type": "score_model",
    "name": "score",
    "model": MODEL,
    "input": [{"role": "user", "content": "{{ item.a }}"}],
    "range": [0, 1],
}
_LABEL = {
    "type": "label_model",
    "name": "label",
    "model": MODEL,
    "labels": ["good", "bad"],
    "passing_labels": ["good"],
    "input": [{"role": "user", "content": "{{ item.a }}"}],
}
_PYTHON = {"type": "python", "name": "py", "source": "def grade(sample, item):\n    return 1.0\n"}
_SIMILAR = {
    "type": "text_similarity",
    "name": "similar",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.a }}",
    "evaluation_metric": "bleu",
}
_MULTI = {"type": "multi", "name": "multi", "graders": {"a": CRITERION}, "calculate_output": "a"}
_GRADERS = (_SCORE, _LABEL, _PYTHON, _SIMILAR, _MULTI)
_FILE = {"type": "file_id", "id": "{file-1}"}
_ASKED = {"type": "item_reference", "item_reference": "item.messages"}
_JOB = {"model": MODEL, "training_file": "{file-1}", "validation_file": "{file-2}"}
_TEMPLATE = {
    "type": "completions",
    "model": MODEL,
    "source": {"type": "file_content", "content": [{"item": {"a": "1", "answer": "1"}}]},
    "input_messages": {"type": "template", "template": [{"role": "user", "content": "{{ item.a }}"}]},
    "sampling_params": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    },
}
_JUDGED = {
    "type": "jsonl",
    "source": {"type": "file_content", "content": [{"item": {"answer": "1"}, "sample": {"output_text": "1"}}]},
}
_CONFIG = {
    "type": "custom",
    "item_schema": {"type": "object", "properties": {name: {"type": "string"} for name in ("a", "answer")}},
    "include_sample_schema": True,
}
_ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}

MORE: dict[Route, list[Any]] = {
    ("POST", "/v1/fine_tuning/jobs"): [
        {**_JOB, "hyperparameters": {"n_epochs": 1}, "metadata": {"a": "b"}, "allowed_sizes": [1]},
        {**_JOB, "integrations": [{"type": "wandb", "wandb": {"project": "p", "tags": ["a"]}}]},
        {**_JOB, "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1}}}},
        {**_JOB, "method": {"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 1}}}},
        *(
            {**_JOB, "method": {"type": "reinforcement", "reinforcement": {"grader": one}}}
            for one in (CRITERION, _MULTI, _SCORE)
        ),
    ],
    ("POST", "/v1/fine_tuning/alpha/graders/validate"): [{"grader": one} for one in _GRADERS],
    ("POST", "/v1/fine_tuning/alpha/graders/run"): [
        {"grader": one, "model_sample": "2", "item": {"a": "1", "answer": "2"}} for one in (_MULTI, _SIMILAR)
    ],
    ("POST", "/v1/evals"): [
        {"data_source_config": _CONFIG, "testing_criteria": [one], "metadata": {"a": "b"}} for one in _GRADERS
    ],
    ("POST", "/v1/evals/{eval_id}/runs"): [{"data_source": _TEMPLATE}, {"data_source": _JUDGED}],
    ("POST", "/admin/v1/plan"): [{"serve": {"model": MODEL}}],
    ("POST", "/v1/files/{file_id}/check"): [{"against": "{file-2}"}],
    ("POST", "/v1/files/{file_id}/prepare"): [{"drop": ["duplicates"], "split": 0.5}],
    ("POST", "/v1/responses"): [
        {
            "model": MODEL,
            "input": [_ITEM],
            "background": True,
            "metadata": {"a": "b"},
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        }
    ],
    ("POST", "/v1/chat/completions/{completion_id}"): [{"metadata": {"a": "b"}}],
    ("POST", "/internal/responses"): [
        [
            {
                "key": "{key}",
                "previous": None,
                "input": [_ITEM],
                "response": {"id": "resp_{unique}", "status": "completed", "created_at": 1, "output": [_ITEM]},
            }
        ]
    ],
    ("POST", "/admin/v1/keys"): [
        {"name": "n-{unique}", "owner": "{owner}", "models": [MODEL], "scopes": ["inference"], "bounds": {"files": 1}}
    ],
    ("POST", "/admin/v1/models/starter"): [{"minutes": 1}],
    ("POST", "/admin/v1/devices/{device_id:path}/undrain"): [{}],
    ("PATCH", "/admin/v1/keys/{id_or_name}"): [{"models": [MODEL], "bounds": {"files": 1}}],
}
