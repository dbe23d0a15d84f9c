"""Computes how far a run is: a pure function of its row, its job and its gate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from appliance.controller.pipelines.spec import STEPS, Check, PipelineSpec, skipped
from appliance.store.rows import FileRow, GateRow, JobRow, PipelineRunRow

State = Literal["skipped", "waiting", "running", "done", "failed"]
_Told = tuple[State, str]


@dataclass(frozen=True, slots=True)
class Step:
    """says: what the step does, waits for or found. Times: seconds since 1970, None before they come."""

    name: str
    state: State
    says: str = ""
    began_s: float | None = None
    ended_s: float | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What a run has made so far; None: not yet made, or deleted."""

    file: FileRow | None = None
    job: JobRow | None = None
    gate: GateRow | None = None
    answers: bool = False


@dataclass(frozen=True, slots=True)
class End:
    """How a run ended. outcome: as in PipelineRunRow; "" if it failed."""

    failed: bool
    reason: str
    outcome: str = ""


def steps_of(spec: PipelineSpec, run: PipelineRunRow, seen: Seen, now_s: float) -> list[dict[str, Any]]:
    """The steps in order, with the times that were already known."""
    out, known = skipped(spec), {one["name"]: one for one in run.steps}
    found = []
    for name in STEPS:
        state, says = ("skipped", "") if name in out else _TOLD[name](spec, run, seen)
        before = known.get(name, {})
        began_s = before.get("began_s") or (now_s if state in ("running", "done", "failed") else None)
        ended_s = before.get("ended_s") or (now_s if state in ("done", "failed") else None)
        found.append(asdict(Step(name, state, says, began_s, ended_s)))
    return found


def beyond(check: Check, report: dict[str, Any]) -> list[str]:
    """Says of which finding there is more than allowed; "" if of none. report: of a check of the run's data."""
    exceeded = []
    for name, most in check.at_most.items():
        found = report["checks"].get(name)
        if found is not None and found["share"] > most:
            how_much = f"{found['count']} of {report['examples']} examples ({found['share']:.2%})"
            exceeded.append(f"{name.replace('_', ' ')}: {how_much}, at most {most:.2%}")
    return exceeded


def end_of(spec: PipelineSpec, seen: Seen) -> End | None:
    """How a run that has a job ended; None if it has not ended."""
    job, gate = seen.job, seen.gate
    if job is None:
        return End(True, "its job was deleted")
    if job.finished and job.phase != "succeeded":
        why = (job.error or {}).get("message") or job.reason
        return End(True, f"{job.id} {job.phase}" + (f": {why}" if why else ""))
    if gate is not None:
        if gate.state != "ended":
            return None
        if gate.verdict in ("undecided", "cancelled"):
            return End(True, f"{gate.id} {gate.verdict}: {gate.reason}")
        return End(False, gate.reason, "answers" if gate.activated else "left")
    if not job.finished:
        return None
    if spec.evaluate is not None:
        return End(True, f"the gate of {job.id} was deleted")
    return End(False, f"{job.id} made a version of {job.output_model}", "answers" if seen.answers else "left")


def _data(spec: PipelineSpec, run: PipelineRunRow, seen: Seen) -> _Told:
    if run.file_id is None:
        return "running", run.reason
    return "done", f"{run.data_files} file{'s' if run.data_files != 1 else ''}, {run.data_bytes:,} bytes"


def _check(spec: PipelineSpec, run: PipelineRunRow, seen: Seen) -> _Told:
    if run.file_id is None:
        return "waiting", ""
    report, checked = (seen.file.report if seen.file is not None else None) or {}, run.made.get("checked")
    if seen.file is not None and seen.file.status == "error" and not (spec.prepare and spec.prepare.drop):
        return "failed", seen.file.status_details or "the data has bad examples"
    if run.made.get("beyond"):
        return "failed", "; ".join(run.made["beyond"])
    if checked is None and isinstance(spec.check, Check) and run.job_id is None:
        return "running", run.reason
    says = [f"{report['n_examples']} examples"] if "n_examples" in report else []
    says += [f"{count} {name.replace('_', ' ')}" for name, count in (checked or {}).items() if count]
    return "done", ", ".join(says)


def _prepare(spec: PipelineSpec, run: PipelineRunRow, seen: Seen) -> _Told:
    made = run.made.get("dropped")
    if made is None:
        ready = run.file_id is not None and (not isinstance(spec.check, Check) or "checked" in run.made)
        return ("running", run.reason) if ready else ("waiting", "")
    says = [f"{count} {name.replace('_', ' ')} left out" for name, count in made.items() if count]
    return "done", ", ".join(says) or "nothing was left out"


def _train(spec: PipelineSpec, run: PipelineRunRow, seen: Seen) -> _Told:
    if run.job_id is None:
        return "waiting", run.reason if run.file_id is not None else ""
    job = seen.job
    if job is None:
        return "failed", f"{run.job_id} was deleted"
    if job.phase == "succeeded":
        return "done", f"{job.id}: {job.step} steps" + (f", loss {job.loss:.4f}" if job.loss is not None else "")
    if job.finished:
        return "failed", f"{job.id} {job.phase}: {(job.error or {}).get('message') or job.reason}"
    if job.phase == "running":
        loss = f", loss {job.loss:.4f}" if job.loss is not None else ""
        return "running", f"{job.id}: step {job.step} of {job.total_steps or '?'}{loss}"
    return "running", f"{job.id} {job.phase}: {job.reason}"


def _evaluate(spec: PipelineSpec, run: PipelineRunRow, seen: Seen) -> _Told:
    gate = seen.gate
    if gate is None or gate.state == "waiting":
        return "waiting", ""
    if gate.state == "evaluating":
        return "running", gate.reason
    if not gate.told:
        return "failed", gate.reason
    return "done", "; ".join(_numbers(one) for one in gate.told)


def _numbers(suite: dict[str, Any]) -> str:
    new, old = suite["candidate"] or {}, suite["incumbent"] or {}
    if new.get("pass_rate") is None:
        return f"{suite['name']}: nothing was judged"
    before = f", {old['pass_rate']:.1%} before" if old.get("pass_rate") is not None else ""
    return f"{suite['name']}: {new['pass_rate']:.1%} of {suite['items']} passed{before}"


def _gate(spec: PipelineSpec, run: PipelineRunRow, seen: Seen) -> _Told:
    gate = seen.gate
    if gate is None or gate.verdict is None:
        return "waiting", ""
    says = f"{gate.id} {gate.verdict}: {gate.reason}"
    return ("done" if gate.verdict in ("passed", "refused") else "failed"), says


def _canary(spec: PipelineSpec, run: PipelineRunRow, seen: Seen) -> _Told:
    gate = seen.gate
    if gate is None or gate.state in ("waiting", "evaluating"):
        return "waiting", ""
    if gate.verdict != "passed":
        return "skipped", ""
    if gate.state == "ended":
        return "done", "promoted" if gate.activated else gate.reason
    return (
        "running",
        f"{gate.version} is compared with {gate.before}" if gate.state == "canary" else "it is about to begin",
    )


def _promote(spec: PipelineSpec, run: PipelineRunRow, seen: Seen) -> _Told:
    gate, job = seen.gate, seen.job
    if gate is None:
        done = job is not None and job.phase == "succeeded" and spec.evaluate is None
        return ("done", "its version answers" if seen.answers else "it does not answer") if done else ("waiting", "")
    if gate.state != "ended":
        return "waiting", ""
    if gate.activated:
        return "done", f"{gate.version} answers" + (f" in place of {gate.before}" if gate.before else "")
    return "skipped", f"{gate.before} goes on answering" if gate.before else "no version answers yet"


_TOLD = {
    "data": _data,
    "check": _check,
    "prepare": _prepare,
    "train": _train,
    "evaluate": _evaluate,
    "gate": _gate,
    "canary": _canary,
    "promote": _promote,
}
