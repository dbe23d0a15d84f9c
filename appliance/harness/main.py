"""Runs tasks of lm-evaluation-harness on models of a box: JSON of `Wish` on stdin, figures as JSON on stdout."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.cli import output
from appliance.cli.client import Address, Client
from appliance.cli.command import Session
from appliance.cli.errors import CliError
from appliance.cli.jobs.eval import Z_95
from appliance.harness.batches import Batches
from appliance.harness.errors import Unsupported
from appliance.harness.kept import NotKept, keep


@dataclass(frozen=True)
class Wish:
    """folder: has the user's own tasks. limit: questions of each task, None for all. examples: how many are shown
    before a question, None for as many as the task says. hub: whether data may come over the network."""

    address: dict[str, Any]
    api_key: str | None
    models: list[str]
    tasks: list[str]
    folder: str | None
    limit: int | None
    examples: int | None
    chat: bool
    max_tokens: int
    seed: int | None
    hub: bool
    keep: bool


def run(wish: Wish) -> list[dict[str, Any]]:
    """A row for each model, task and figure: `model`, `task`, `metric`, `value`, `low`, `high` (95 %, None if the
    library gives no standard error), `questions`, `as` (how it was asked: messages or text), and where its answers are
    kept `eval_id` and `run_id`, else None. Raises CliError, Unsupported, and what the library raises."""
    if not wish.hub:  # read as the libraries are imported
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    import lm_eval
    from lm_eval.tasks import TaskManager

    from appliance.harness.box_model import BoxModel

    manager = TaskManager(include_path=wish.folder) if wish.folder else TaskManager()
    client = Client(Address(**wish.address), wish.api_key)
    session = Session(client, "json", None, wish.api_key)
    batches = Batches(session)
    rows: list[dict[str, Any]] = []
    for task in wish.tasks:
        kinds = {one.OUTPUT_TYPE for one in manager.load([task])["tasks"].values()}
        # The API has no log-probabilities of what stands within messages, so choices are scored as plain text.
        chat = wish.chat and kinds == {"generate_until"}
        found = {
            name: lm_eval.simple_evaluate(
                model=BoxModel(batches, name, chat=chat, max_tokens=wish.max_tokens, seed=wish.seed),
                tasks=[task],
                task_manager=manager,
                num_fewshot=wish.examples,
                limit=wish.limit,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
                log_samples=wish.keep,
            )
            for name in wish.models
        }
        asked_as = "messages" if chat else "text"
        about = {"as": asked_as, "examples": wish.examples, "limit": wish.limit, "lm_eval": lm_eval.__version__}
        ids = _kept(session, about, found) if wish.keep else {}
        for name, one in found.items():
            for row in figures(name, one):
                of = ids.get(row["task"], {})
                rows.append({**row, "as": asked_as, "eval_id": of.get(""), "run_id": of.get(name)})
    return rows


def _kept(session: Session, about: dict[str, Any], found: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Returns what `keep` returns, by task. The figures do not need it, so a failure is only reported."""
    ids = {}
    for task in next(iter(found.values()))["samples"]:
        try:
            ids[task] = keep(session, task, about, {name: one["samples"][task] for name, one in found.items()})
        except (NotKept, CliError) as error:
            output.say(f"{task} is not kept as an evaluation: {error}")
    return ids


def figures(model: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns one row for each figure of the library, which names them `metric,filter` and `metric_stderr,filter`."""
    rows = []
    for task, told in found["results"].items():
        questions = (found.get("n-samples") or {}).get(task, {}).get("effective")
        for key, value in told.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = told.get(f"{metric}_stderr,{chosen}")
            known = isinstance(error, int | float)
            rows.append(
                {
                    "model": model,
                    "task": task,
                    "metric": metric if chosen == "none" else f"{metric} ({chosen})",
                    "value": value,
                    "low": value - Z_95 * error if known else None,
                    "high": value + Z_95 * error if known else None,
                    "questions": questions,
                }
            )
    return rows


def main() -> None:
    # What the library prints meanwhile would otherwise stand in the middle of the answer.
    answer, sys.stdout = sys.stdout, sys.stderr
    wish = Wish(**json.load(sys.stdin))
    if wish.folder and not Path(wish.folder).is_dir():
        sys.exit(f"--tasks-path {wish.folder}: no such folder")
    try:
        rows = run(wish)
    except (CliError, Unsupported) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("ended; the batch goes on, and the same command finds its answers (`appliance batch list`)")
    json.dump(rows, answer)


if __name__ == "__main__":
    main()
