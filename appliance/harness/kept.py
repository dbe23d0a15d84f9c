"""Keeps what the library found about each question on the box: each task becomes an evaluation, and each model that was
asked one of its runs. `client.evals` and `appliance eval show` list them beside the box's own evaluations."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from appliance.cli import paths
from appliance.cli.command import Session
from appliance.cli.jobs.file import kept_if_taken, send

MOST_ITEMS = 10_000
"""The most items of a run; see appliance.controller.evals.requests."""
MOST_TEXT = 2000
"""Characters that are kept of a question, of its answer and of what was expected, so that a run has room for 10,000."""
KEY = "harness"
_MOST_EVALS = 1000
Samples = Sequence[Mapping[str, Any]]


class NotKept(Exception):
    """The box's evaluations cannot keep the result; the message says why."""


def keep(session: Session, task: str, about: Mapping[str, Any], found: Mapping[str, Samples]) -> dict[str, str]:
    """Returns the id of each model's run, and that of the evaluation under "". found: what the library logged of each
    question, by model. about: how it was asked; a question asked in another way is another evaluation. Raises NotKept,
    CliError."""
    items = {model: _items(samples) for model, samples in found.items()}
    names = sorted(set.intersection(*(set(item["scores"]) for rows in items.values() for item, _ in rows)))
    if not names:
        raise NotKept(f"{task} has no figure that is a mean over its questions")
    if (most := max(map(len, items.values()))) > MOST_ITEMS:
        raise NotKept(f"{task} has {most:,} questions; a run has {MOST_ITEMS:,} at most (--limit)")
    criteria = [_criterion(name, items) for name in names]
    eval_id = _evaluation(session, task, dict(about), criteria)
    ids = {}
    for model, rows in items.items():
        with tempfile.TemporaryDirectory() as folder, kept_if_taken(session) as uploaded:
            path = Path(folder) / f"{task.replace('/', '-')}.jsonl"
            lines = (json.dumps({"item": item, "sample": {"output_text": text}}) for item, text in rows)
            path.write_text("".join(f"{line}\n" for line in lines))
            uploaded.append(str(send(session, path, "user_data")["id"]))
            source = {"type": "jsonl", "source": {"type": "file_id", "id": uploaded[0]}}
            body = {"name": model, "data_source": source, "metadata": {"model": model}}
            ids[model] = str(session.client.post(f"{paths.evaluation(eval_id)}/runs", body)["id"])
    return {"": eval_id, **ids}


def _items(samples: Samples) -> list[tuple[dict[str, Any], str]]:
    """Returns the item of each question with its scores and its answer. The library logs a question once for each
    filter that a task's answers go through."""
    found: dict[Any, tuple[dict[str, Any], str]] = {}
    for sample in samples:
        question, answer = _asked(sample)
        item: dict[str, Any] = {
            "question": question[-MOST_TEXT:],
            "target": str(sample["target"])[:MOST_TEXT],
            "scores": {},
        }
        item, _ = found.setdefault(sample["doc_id"], (item, answer[:MOST_TEXT]))
        for metric in sample["metrics"]:
            value, chosen = sample[metric], sample.get("filter", "none")
            if isinstance(value, Real) and math.isfinite(value):
                score = float(value)
                name = metric if chosen == "none" else f"{metric} ({chosen})"
                item["scores"][name] = int(score) if score.is_integer() else score
    return [found[number] for number in sorted(found)]


def _asked(sample: Mapping[str, Any]) -> tuple[str, str]:
    """Returns what a model was asked and its answer, which is a text, or the likeliest of several."""
    texts, responses = sample["arguments"], sample["filtered_resps"]
    if all(isinstance(one, tuple | list) and isinstance(one[0], Real) for one in responses):
        best = max(range(len(responses)), key=lambda place: responses[place][0])
        return str(texts[best][0]), str(texts[best][1])
    return str(texts[0][0]), str(responses[0])


def _criterion(name: str, items: Mapping[str, Sequence[tuple[dict[str, Any], str]]]) -> dict[str, Any]:
    """Returns a grader that gives the library's score as its reward."""
    place = f"item.scores[{json.dumps(name)}]"
    if all(item["scores"][name] in (0, 1) for rows in items.values() for item, _ in rows):
        check = {"type": "string_check", "operation": "eq", "input": f"{{{{ {place} }}}}", "reference": "1"}
        return {**check, "name": name}
    source = f'def grade(sample, item):\n    return float(item["scores"][{json.dumps(name)}])\n'
    return {"type": "python", "name": name, "source": source}


def _evaluation(session: Session, task: str, about: dict[str, Any], criteria: list[dict[str, Any]]) -> str:
    """Returns the evaluation of a task asked in this way, always the same one. Raises CliError."""
    key = hashlib.sha256(json.dumps([task, about, criteria], sort_keys=True).encode()).hexdigest()[:32]
    for known in session.client.listed("/v1/evals", most=_MOST_EVALS, order="desc")["data"]:
        if (known["metadata"] or {}).get(KEY) == key:
            return str(known["id"])
    made = {
        "name": task,
        "data_source_config": {
            "type": "custom",
            "item_schema": {"type": "object"},
            "include_sample_schema": True,
        },
        "testing_criteria": criteria,
        "metadata": {KEY: key, **{name: str(value) for name, value in about.items()}},
    }
    return str(session.client.post("/v1/evals", made)["id"])
