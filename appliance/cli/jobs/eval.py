"""`appliance eval`: how good models are at a suite of prompts, by graders; side by side, with confidence intervals."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli import formats, output, paths
from appliance.cli.command import Session, box_command, given, group
from appliance.cli.complete import models as complete_models
from appliance.cli.errors import BadUsage, CommandFailed
from appliance.cli.jobs.file import kept_if_taken, send
from appliance.cli.jobs.request import json_file
from appliance.cli.operations import TIMEOUT, Patience

app = group("Evaluations: how good models are at a suite of prompts, by graders (docs/evals.md).")
FINISHED = frozenset({"completed", "failed", "canceled"})
Z_95 = 1.959964
"""Standard deviations of a normal distribution that 95 % lie within."""
_RUNS_SHOWN = 100
_ITEMS_SHOWN = 10_000
"""As many as a run has at most."""
_CELL_CHARACTERS = 60


@box_command(
    app,
    "appliance eval run starter --suite prompts.jsonl --grader grader.json --wait",
    "appliance eval run fraud@v1 fraud@v2 --suite prompts.jsonl --grader grader.json --wait       side by side",
    "appliance eval run starter --eval eval_abc123 --suite prompts.jsonl       one more model, by the same graders",
    "",
    'A line of prompts.jsonl: {"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}, as for',
    "`job submit --method reinforcement`; grader.json has one grader, or a list of them.",
    "An item passes with half of a grader's range, or with what its `pass_threshold` says (docs/evals.md).",
)
def run(
    session: Session,
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", autocompletion=complete_models)],
    suite: Annotated[Path, typer.Option("--suite", metavar="PATH", help="Prompts, with what graders compare with.")],
    grader: Annotated[Path | None, typer.Option("--grader", metavar="PATH", help="JSON: a grader or a list.")] = None,
    eval_id: Annotated[
        str | None, typer.Option("--eval", metavar="EVAL_ID", help="Use the graders of this evaluation.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="The longest answer, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option("--temperature", min=0, max=2)] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", min=0)] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when all have ended; exit code 1 if one failed.")
    ] = False,
    timeout: TIMEOUT = None,
) -> None:
    """Ask models all prompts of a suite, while engines are idle, and have the answers graded."""
    if (grader is None) == (eval_id is None):
        raise BadUsage("give either --grader, the graders of a new evaluation, or --eval, that of an earlier one")
    for model in models:  # before anything is made
        session.client.get(f"/v1/models/{paths.segment(model)}")
    graders = None if grader is None else json_file("--grader", grader)
    sampling = given(max_completion_tokens=max_tokens, temperature=temperature, seed=seed)

    def begin(model: str) -> None:
        source = {
            "type": "completions",
            "model": model,
            "source": {"type": "file_id", "id": file_id},
            "input_messages": {"type": "item_reference", "item_reference": "item.messages"},
            "sampling_params": sampling,
        }
        session.client.post(f"{paths.evaluation(eval_id)}/runs", {"name": model, "data_source": source})

    with kept_if_taken(session) as uploaded, kept_if_taken(session, paths.evaluation) as made:
        file_id = _sent(session, suite)
        uploaded.append(file_id)
        if graders is not None:
            wish = {
                "name": suite.stem,
                "data_source_config": {
                    "type": "custom",
                    "item_schema": {"type": "object"},
                    "include_sample_schema": True,
                },
                "testing_criteria": graders if isinstance(graders, list) else [graders],
            }
            eval_id = str(session.client.post("/v1/evals", wish)["id"])
            made.append(eval_id)
        assert eval_id is not None
        begin(models[0])
    for model in models[1:]:
        begin(model)
    if wait:
        _wait(session, eval_id, timeout)
    found = _runs(session, eval_id)
    session.show({"id": eval_id, "runs": found}, _side_by_side)
    if wait:
        _refuse_bad(found)


@box_command(app, "appliance eval list", name="list")
def list_evals(session: Session) -> None:
    """List evaluations, the newest first."""
    session.show(session.client.listed("/v1/evals", most=100, order="desc"), _table)


@box_command(
    app,
    "appliance eval show eval_abc123",
    "appliance eval show eval_abc123 -o json | jq .runs",
    "appliance eval show eval_abc123 --items evalrun_abc123           what was asked, answered and judged",
)
def show(
    session: Session,
    eval_id: Annotated[str, typer.Argument(metavar="EVAL_ID")],
    items: Annotated[
        str | None, typer.Option("--items", metavar="RUN_ID", help="The items of this run; whole with -o json.")
    ] = None,
) -> None:
    """Show the runs of an evaluation side by side: each grader's share that passed, with a 95 % interval, the mean
    reward, and what a run waits for."""
    if eval_id.startswith("evalrun_"):
        raise BadUsage(f"{eval_id} is a run; give its evaluation, `appliance eval list` shows them (eval_…)")
    if items is not None:
        path = f"{paths.evaluation(eval_id)}/runs/{paths.segment(items)}/output_items"
        session.show(session.client.listed(path, most=_ITEMS_SHOWN, order="asc"), _items)
        return
    found = session.client.get(paths.evaluation(eval_id))
    session.show({**found, "runs": _runs(session, eval_id)}, _side_by_side)


def _sent(session: Session, suite: Path) -> str:
    """The id of the file with the suite's items. Raises BadUsage for a line that has no messages."""
    lines = []
    try:
        for number, line in enumerate(suite.read_text().splitlines(), 1):
            if not line.strip():
                continue
            item = json.loads(line)
            if not isinstance(item, dict) or not isinstance(item.get("messages"), list):
                raise BadUsage(f"--suite {suite}, line {number}: expected an object with 'messages', a list")
            lines.append(json.dumps({"item": item}))
    except OSError as error:
        raise BadUsage(f"--suite {suite} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadUsage(f"--suite {suite}, line {number}: no JSON: {error}") from error
    if not lines:
        raise BadUsage(f"--suite {suite} has no prompts")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / suite.name
        path.write_text("\n".join(lines) + "\n")
        return str(send(session, path, "user_data")["id"])


def _runs(session: Session, eval_id: str) -> list[dict[str, Any]]:
    return session.client.listed(f"{paths.evaluation(eval_id)}/runs", most=_RUNS_SHOWN, order="desc")["data"]


def _wait(session: Session, eval_id: str, timeout_s: float | None) -> None:
    """Returns when no run of it goes on. Raises WaitTimedOut."""
    patience = Patience(timeout_s)
    with output.progress(eval_id) as meter:
        going = _runs(session, eval_id)
        while going := [run for run in going if run["status"] not in FINISHED]:
            counts = [run["result_counts"] for run in going]
            done = sum(one["passed"] + one["failed"] + one["errored"] for one in counts)
            meter.update(
                f"{eval_id} {going[-1]['model']}", done=done, total=sum(one["total"] for one in counts) or None
            )
            patience.pause(f"{eval_id} is not done after {patience.limit}; it goes on")
            found = patience.get(session, f"{paths.evaluation(eval_id)}/runs", limit=_RUNS_SHOWN, order="desc")
            going = found["data"] if found else going


def _refuse_bad(runs: list[dict[str, Any]]) -> None:
    """Raises CommandFailed unless every run has judged every item."""
    for run in runs:
        if run["status"] != "completed":
            raise CommandFailed(f"{run['id']} of {run['model']} is {run['status']}: {run['error']['message']}")
        if errored := run["result_counts"]["errored"]:
            raise CommandFailed(f"{errored} items of {run['id']} of {run['model']} could not be judged")


def interval(passed: int, judged: int) -> tuple[float, float]:
    """Where the true share lies with 95 % confidence (Wilson's score interval)."""
    if not judged:
        return 0.0, 1.0
    share, square = passed / judged, Z_95 * Z_95
    middle = share + square / (2 * judged)
    half = Z_95 * math.sqrt(share * (1 - share) / judged + square / (4 * judged * judged))
    return (middle - half) / (1 + square / judged), (middle + half) / (1 + square / judged)


def _share(passed: int, failed: int) -> str:
    judged = passed + failed
    if not judged:
        return "-"
    low, high = interval(passed, judged)
    return f"{passed / judged:.1%} ({low:.1%} to {high:.1%})"


def _side_by_side(found: dict[str, Any]) -> Any:
    runs = found["runs"]
    names = list(dict.fromkeys(one["testing_criteria"] for run in runs for one in run["per_testing_criteria_results"]))
    rows = []
    for run in runs:
        counts = run["result_counts"]
        by_name = {one["testing_criteria"]: one for one in run["per_testing_criteria_results"]}
        results = [by_name.get(name, {"passed": 0, "failed": 0}) for name in names]
        columns = [(_share(one["passed"], one["failed"]), _reward(one.get("mean_reward"))) for one in results]
        rows.append(
            (
                run["model"] or run["name"],
                run["status"],
                _share(counts["passed"], counts["failed"]),
                *(text for pair in columns for text in pair),
                str(counts["total"]),
                str(counts["errored"]),
                run["id"],
            )
        )
    graders = [title for name in names for title in (f">{name.upper()}", ">REWARD")]
    header = ("MODEL", "STATUS", ">PASSED", *graders, ">ITEMS", ">ERRORS", "RUN")
    waiting = [f"{run['id']} waits: {run['waits_for']}" for run in runs if run.get("waits_for")]
    table = output.table(header, rows, empty="no runs; `appliance eval run` starts one")
    return output.stack(found["id"], table, *waiting)


def _items(answer: dict[str, Any]) -> Any:
    rows = answer["data"]
    names = list(dict.fromkeys(one["name"] for row in rows for one in row["results"]))
    lines = []
    for row in rows:
        sample, by_name = row["sample"], {one["name"]: one for one in row["results"]}
        prompt, reply = sample["input"], sample["output"]
        lines.append(
            (
                str(row["datasource_item_id"] + 1),
                row["status"],
                _cell(prompt[-1]["content"] if prompt else ""),
                _cell(reply[-1]["content"] if reply else sample["error"]["message"]),
                *(_verdict(by_name.get(name)) for name in names),
            )
        )
    header = ("ITEM", "STATUS", "PROMPT", "ANSWER", *map(str.upper, names))
    return output.table(header, lines, empty="no items yet")


def _cell(text: str) -> str:
    line = " ".join(text.split())
    return formats.or_dash(line if len(line) <= _CELL_CHARACTERS else f"{line[: _CELL_CHARACTERS - 1]}…")


def _verdict(result: dict[str, Any] | None) -> str:
    if result is None:
        return "-"
    if "error" in result:
        return _cell(f"error: {result['error']}")
    why = f": {result['reason']}" if "reason" in result else ""
    return _cell(f"{'pass' if result['passed'] else 'fail'} {result['score']:.4g}{why}")


def _reward(mean: float | None) -> str:
    return "-" if mean is None else f"{mean:.4g}"


def _table(answer: dict[str, Any]) -> Any:
    return output.table(
        ("ID", "NAME", "GRADERS", "CREATED"),
        (
            (
                *formats.cells(row, "id name"),
                ", ".join(one["name"] for one in row["testing_criteria"]),
                formats.moment(row["created_at"]),
            )
            for row in answer["data"]
        ),
        empty="no evaluations; `appliance eval run` makes one",
    )
