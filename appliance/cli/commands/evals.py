"""`appliance eval run|show` and `appliance batch create`: many prompts at once, answered while engines are idle."""

from __future__ import annotations

import json
import math
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from appliance.cli import output
from appliance.cli.command import TIMEOUT, WORK_TIMEOUT_S, Doing, Session, command, until
from appliance.cli.commands.data import UPLOAD
from appliance.cli.errors import BadUsage, CommandFailed
from appliance.cli.options import flag, json_file, number, opt, picked, text_file
from appliance.cli.resources import has_ended, segment

Z_95 = 1.959964
"""Standard deviations of a normal distribution that 95 % lie within."""
_ITEMS_SHOWN = 10_000
"""As many as a run has at most."""


def _path(eval_id: str) -> str:
    return f"/v1/evals/{segment(eval_id)}"


@command(
    "batch create",
    UPLOAD,
    opt("--endpoint PATH", "What the lines ask.", default="/v1/chat/completions"),
    flag("--wait", "Return when it has ended; exit code 1 if it failed."),
    TIMEOUT,
)
def create(session: Session, args: Namespace) -> None:
    """Upload FILE and start a batch of its lines, which is done within 24 hours or expires.

    A line of requests.jsonl: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
                               "body": {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hi"}]}}

    Examples:
      appliance batch create requests.jsonl --wait && appliance batch list
    """
    file_id = session.client.upload(args.path, "batch")["id"]
    output.say(f"{args.path} is {file_id} on the box")
    request = {"input_file_id": file_id, "endpoint": args.endpoint, "completion_window": "24h"}
    batch = session.client.post("/v1/batches", request)
    if not args.wait:
        session.show(batch)
        return

    def doing(now: dict[str, Any]) -> Doing:
        counts = now["request_counts"]
        waits = f", waits: {now['waiting_for']}" if now.get("waiting_for") else ""
        return f"{now['id']} {now['status']}{waits}", counts["completed"] + counts["failed"], counts["total"] or None

    path = f"/v1/batches/{segment(batch['id'])}"
    batch = until(lambda: session.client.get(path), has_ended, doing, args.timeout, batch["id"])
    session.show(batch)
    failed = batch["request_counts"]["failed"]
    if batch["status"] != "completed" or failed:
        why = f"; `appliance file get {batch['error_file_id']} --save -` shows why {failed:,} lines failed"
        raise CommandFailed(f"{batch['id']} is {batch['status']}{why if failed else ''}")


def _suite(text: str) -> tuple[Path, str]:
    """Read a file of prompts, as an option's type: return its path and its lines as evaluation items."""
    items = []
    for at, line in enumerate(text_file(text).split("\n"), 1):  # only at LF: JSON may contain other line separators
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise ArgumentTypeError(f"{text}, line {at} is not JSON: {error}") from error
        if not isinstance(item, dict) or not isinstance(item.get("messages"), list):
            raise ArgumentTypeError(f"{text}, line {at}: expected an object with 'messages', a list")
        items.append(json.dumps({"item": item}) + "\n")
    if not items:
        raise ArgumentTypeError(f"{text} has no prompts")
    return Path(text).expanduser(), "".join(items)


@command(
    "eval run",
    opt("models MODEL", nargs="+"),
    opt("--suite PATH", "Prompts, with what graders compare with.", required=True, type=_suite),
    opt("--grader PATH", "JSON: a grader or a list.", type=json_file),
    opt("--eval EVAL_ID", "Use the graders of this evaluation."),
    opt("--max-tokens N", "Of an answer.", dest="max_completion_tokens", type=number(int, 1), default=512),
    opt("--temperature X", "0 to 2.", type=number(float, 0, 2), default=0.0),
    opt("--seed N", "Of the sampling.", type=number(int, 0)),
    flag("--wait", "Return when all have ended; exit code 1 if one failed."),
    TIMEOUT,
)
def run(session: Session, args: Namespace) -> None:
    """Ask models all prompts of a suite, while engines are idle, and have the answers graded.

    A line of prompts.jsonl: {"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}, as for
    `job submit --method reinforcement`; grader.json has one grader, or a list of them. An item passes with half of a
    grader's range, or with what its `pass_threshold` says (docs/evals.md).

    Examples:
      appliance eval run fraud@v1 fraud@v2 --suite prompts.jsonl --grader grader.json --wait       side by side
      appliance eval run smollm2-135m --eval eval_abc123 --suite prompts.jsonl       one more model, by the same graders
    """
    if (args.grader is None) == (args.eval is None):
        raise BadUsage("give either --grader, the graders of a new evaluation, or --eval, that of an earlier one")
    path, items = args.suite
    form = {"data": {"purpose": "user_data"}, "files": {"file": (path.name, items.encode())}}
    file_id = session.client.send("POST", "/v1/files", timeout_s=WORK_TIMEOUT_S, **form)["id"]
    eval_id = args.eval
    if eval_id is None:
        schema = {"type": "custom", "item_schema": {"type": "object"}, "include_sample_schema": True}
        criteria = args.grader if isinstance(args.grader, list) else [args.grader]
        body = {"name": path.stem, "data_source_config": schema, "testing_criteria": criteria}
        eval_id = session.client.post("/v1/evals", body)["id"]
    started: list[str] = []
    for model in args.models:
        source = {
            "type": "completions",
            "model": model,
            "source": {"type": "file_id", "id": file_id},
            "input_messages": {"type": "item_reference", "item_reference": "item.messages"},
            "sampling_params": picked(args, "max_completion_tokens temperature seed"),
        }
        started.append(session.client.post(f"{_path(eval_id)}/runs", {"name": model, "data_source": source})["id"])

    def fetch() -> list[dict[str, Any]]:
        return [session.client.get(f"{_path(eval_id)}/runs/{segment(run_id)}") for run_id in started]

    def doing(runs: list[dict[str, Any]]) -> Doing:
        counts = [run["result_counts"] for run in runs]
        done = sum(count["passed"] + count["failed"] + count["errored"] for count in counts)
        return f"{len(runs)} runs", done, sum(count["total"] for count in counts) or None

    ended: list[dict[str, Any]] = []
    if args.wait:
        ended = until(fetch, lambda runs: all(map(has_ended, runs)), doing, args.timeout, eval_id)
    session.show({"id": eval_id, "runs": _runs(session, eval_id)}, _side_by_side)
    for run in ended:
        errored = run["result_counts"]["errored"]
        if run["status"] != "completed" or errored:
            reason = f"{errored:,} items could not be judged" if errored else (run["error"] or {}).get("message")
            raise CommandFailed(f"{run['id']} of {run['model']} is {run['status']}: {reason}")


def _runs(session: Session, eval_id: str) -> list[dict[str, Any]]:
    return session.client.listed(f"{_path(eval_id)}/runs", order="desc")["data"]


@command("eval show", opt("id EVAL_ID"), opt("--items RUN_ID", "The items of this run; whole with -o json."))
def show(session: Session, args: Namespace) -> None:
    """Show the runs of an evaluation side by side.

    Shown are each grader's share that passed, with a 95 % interval, the mean reward, and what a run waits for.

    Examples:
      appliance eval show eval_abc123 --items evalrun_abc123           what was asked, answered and judged
    """
    if args.items is not None:
        path = f"{_path(args.id)}/runs/{segment(args.items)}/output_items"
        session.show(session.client.listed(path, _ITEMS_SHOWN, order="asc"), _items)
        return
    evaluation = session.client.get(_path(args.id))
    session.show({**evaluation, "runs": _runs(session, args.id)}, _side_by_side)


def interval(passed: int, judged: int) -> tuple[float, float]:
    """Return Wilson's score interval: bounds of the true share with 95 % confidence."""
    if not judged:
        return 0.0, 1.0
    share, square = passed / judged, Z_95 * Z_95
    middle = share + square / (2 * judged)
    half = Z_95 * math.sqrt(share * (1 - share) / judged + square / (4 * judged * judged))
    return (middle - half) / (1 + square / judged), (middle + half) / (1 + square / judged)


def _share(passed: int, failed: int) -> str:
    low, high = interval(passed, passed + failed)
    return f"{passed / (passed + failed):.1%} ({low:.1%} to {high:.1%})" if passed + failed else "-"


def _side_by_side(evaluation: dict[str, Any]) -> Any:
    """Return a table with a row for each grader of each run."""
    rows = []
    for run in evaluation["runs"]:
        counts, graders = run["result_counts"], run["per_testing_criteria_results"]
        reward = graders[0].get("mean_reward") if len(graders) == 1 else None
        share = _share(counts["passed"], counts["failed"])
        rows.append({**run, **counts, "grader": "all", "share": share, "mean_reward": reward})
        for judge in graders if len(graders) > 1 else ():
            share = _share(judge["passed"], judge["failed"])
            rows.append({"grader": judge["testing_criteria"], "share": share, "mean_reward": judge.get("mean_reward")})
    columns = "model=model|name status grader >passed=share ?>reward=mean_reward >items=total >errors=errored run=id "
    return output.stack(
        evaluation["id"], output.listing(columns + "?waits_for", rows, empty="no runs; `appliance eval run` starts one")
    )


def _items(answer: dict[str, Any]) -> Any:
    rows = []
    for row in answer["data"]:
        sample, shown = row["sample"], {"item": row["datasource_item_id"] + 1, "prompt": None, "answer": None}
        if sample["input"]:
            shown["prompt"] = sample["input"][-1].get("content")
        shown["answer"] = sample["output"][-1]["content"] if sample["output"] else sample["error"]
        rows.append({**row, **shown})
    return output.listing("item status prompt:short answer:short graders=results:short", rows, empty="no items yet")
