"""Chooses the settings of a job and its numbers of devices from model, data and box, and validates jobs. Requests,
validation and `plan job` call the same function, so a plan and its job cannot differ."""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from anyio import to_thread

from appliance.controller.access.model_access import Resolved, base_of, resolve
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.tasks import Kind, TaskFailed, is_full
from appliance.controller.devices import cordons
from appliance.controller.files import storage
from appliance.controller.interfaces.errors import BadRequest, InvalidValue
from appliance.controller.jobs.events import VALIDATIONS, add_message, fail
from appliance.controller.models import capacity
from appliance.controller.models.capacity import BoxFacts, Estimator, Verdict
from appliance.store import files, jobs, models
from appliance.store.rows import FileRow, JobRow, TaskRow, VersionRow
from appliance.tiers.tiers import name_of
from runtime.devices.kinds import kind_of
from train.data.formats import TEXT
from train.data.token_set import TOKENS
from train.data_checks.check import DataReport
from train.data_checks.process import differ
from train.methods.method import Method
from train.methods.methods import method_of
from train.plan import auto
from train.plan.errors import InvalidHyperparameter
from train.plan.estimate import ModelShape
from weights.format.errors import StoreFull, WeightsError
from weights.format.foreign_json import config_in
from weights.format.names import has_tokenizer

DEFAULT_CONTEXT_TOKENS = 2048
TOKENIZER = "tokenizer.json"
_NEED_NO_VALIDATION = {
    "publish": ("checkpoints", "end", "epoch"),
    "early_stopping_patience": (0,),
    "eval_interval": (0,),
}


@dataclass(frozen=True, slots=True)
class NodeSizes:
    """Devices per node: the most that a job, or an engine with tensor parallelism, can have, since neither spans nodes.
    Lost nodes count, which the box waits for; one that has yet to join does not.

    counts: devices of each node, of the box's own kind. default_most: limit of a job whose request has none."""

    counts: tuple[int, ...]
    default_most: int

    @property
    def largest(self) -> int:
        return max(self.counts)

    def refuse_more(self, name: str, devices: int, shown: str = "") -> None:
        """Raise BadRequest if no node has as many devices. name: the field at fault. shown: the field's value, in
        words."""
        if devices > self.largest:
            node = "the box" if len(self.counts) == 1 else "the largest node of the box"
            why = f"{name} is {shown or devices}; expected at most {self.largest}, which is all that {node} has"
            how = "Ask for less, or join a node with more devices first (`appliance join`)."
            raise BadRequest(f"{why}. {how}", name, "insufficient_devices")


def nodes_of(context: ControllerContext) -> NodeSizes:
    devices = cordons.in_view(context.db, context.scheduler.status()["devices"])
    # The home node's devices come first, and other nodes are used only with devices of their kind.
    kind = devices[0]["kind"]
    counts = tuple(Counter(d["node"] for d in devices if d["kind"] == kind).values())
    # More ranks than cores are slower than fewer ranks.
    return NodeSizes(counts, min(max(counts), host_cores()) if kind_of(kind).on_host else max(counts))


def host_cores() -> int:
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class DeviceBounds:
    """The numbers of devices that a request allows, with the fields of a JobRow."""

    min_devices: int | None = None
    max_devices: int | None = None

    @property
    def least(self) -> int:
        return self.min_devices or 1

    def most(self, nodes: NodeSizes, together: int = 1) -> int:
        """Return the most devices that the job may take, present or not. together: number of ranks that share a row."""
        return self.max_devices or max(nodes.default_most, self.least, together)

    def divided(self, resolved: dict[str, Any], nodes: NodeSizes) -> tuple[list[int], list[int]]:
        """Return numbers of devices that divide the work of a step: all of them, and those within the bounds."""
        together = auto.ranks_of_row(resolved)
        most = self.most(nodes, together)
        by_batch = auto.allowed_sizes(resolved["batch_size"], most, resolved["micro_batch"], together)
        return by_batch, [size for size in by_batch if size >= self.least]

    def check(self, resolved: dict[str, Any] | None, nodes: NodeSizes) -> list[int]:
        """Return the numbers of devices within the bounds that divide a step, even if only a node yet to join has so
        many; empty before the job is resolved. Raises BadRequest if no number fits the bounds, or none fits a known
        node."""
        least, most = self.least, self.max_devices
        if most is not None and least > most:
            raise InvalidValue(f"min_devices is {least} and max_devices {most}; expected min <= max.", "min_devices")
        nodes.refuse_more("min_devices", least)
        if resolved is None:
            return []
        by_batch, fitting = self.divided(resolved, nodes)
        if not fitting:
            together = auto.ranks_of_row(resolved)
            grouped = f", each over {together} devices (tensor_parallel, sequence_parallel)," if together > 1 else ""
            raise InvalidValue(
                f"A step of {resolved['batch_size']} sequences in micro-batches of {resolved['micro_batch']}{grouped} "
                f"divides into {', '.join(map(str, by_batch)) or 'no allowed number of'} devices; min_devices and "
                "max_devices leave none of them.",
                "min_devices",
            )
        sizes = ", ".join(map(str, fitting))
        reason = f"such that a step of {resolved['batch_size']} sequences divides into {sizes} devices only"
        nodes.refuse_more("min_devices", fitting[0], reason)
        return fitting


class _Candidate(NamedTuple):
    """The fields of a TrainSpec with one number of ranks for a row, the layouts that fit, and a warning about them."""

    fields: dict[str, Any]
    layouts: list[capacity.Layout]
    warning: str


@dataclass(frozen=True, slots=True)
class SettingsRequest:
    """The settings that a request has for a job. hyperparameters: "auto" or absent where the box chooses."""

    context: ControllerContext
    base: Resolved
    method: Method
    hyperparameters: dict[str, Any]
    dataset: auto.DatasetStats
    bounds: DeviceBounds

    def resolve(self) -> dict[str, Any]:
        """Return the fields of a TrainSpec, before a layout is chosen. Raises InvalidHyperparameter."""
        requested, bounds, nodes = self.hyperparameters, self.bounds, nodes_of(self.context)
        model = model_stats(self.context, self.base)
        together = math.prod(
            n for name in ("tensor_parallel", "sequence_parallel") if type(n := requested.get(name)) is int
        )
        most = max(1, min(bounds.most(nodes, together), nodes.largest))
        resolved = self.method.resolve(requested, self.dataset, model, most)
        if bounds.min_devices and not self._is_set("batch_size") and not bounds.divided(resolved, nodes)[1]:
            # An automatic batch size follows from the requested devices, not the other way round.
            each = bounds.min_devices * resolved["micro_batch"]
            rows = math.ceil(resolved["batch_size"] / each) * each
            resolved = self.method.resolve({**requested, "batch_size": rows}, self.dataset, model, most)
        return resolved

    def choose(self) -> tuple[dict[str, Any], Verdict, list[dict[str, Any]]]:
        """Resolve the settings and choose the best layout that fits the box.

        Returns the fields of a TrainSpec; whether it fits, and on how many devices; and the layouts that fit as
        `Estimator.described` has them, the best first, which is that of the fields. Raises InvalidHyperparameter;
        BadRequest as `DeviceBounds.check` does."""
        bounds, method, dataset, resolved = self.bounds, self.method, self.dataset, self.resolve()
        nodes = nodes_of(self.context)
        bounds.check(resolved, nodes)
        speed, memory = jobs.factors(self.context.db, self.base.name, method.name, resolved["full"])
        box = replace(box_facts(self.context), memory_factor=memory, speed_factor=speed)
        kept = [name for name in capacity.LAYOUT if self._is_set(name)]
        estimator = Estimator(shape_of(self.base), box, method, method.load(dataset, resolved))
        steps = auto.steps(method.rows(dataset), resolved)
        candidates = []
        for parts in self._row_parts(resolved, box):
            shared = resolved | {"sequence_parallel": parts}
            sizes = bounds.divided(shared, nodes)[1]
            by_micro = {n: bounds.divided({**shared, "micro_batch": n}, nodes)[1] for n in auto.micro_batches(shared)}
            # A micro-batch that the box chooses must not exclude any number of devices.
            by_micro = {n: possible for n, possible in by_micro.items() if possible and set(sizes) <= set(possible)}
            layouts, warning = estimator.fit(shared, by_micro, kept) if by_micro else ([], "")
            if layouts:
                candidates.append(_Candidate(shared, layouts, warning))
                if parts == 1 and layouts[0].risk == capacity.NO_RISK and not warning:
                    break  # sharing a row costs communication in every layer and excludes numbers of devices
        chosen = _Candidate(resolved, [], "")
        # A layout with a warning does not keep all requested settings: it comes last, even if it is faster.
        if candidates := [candidate for candidate in candidates if not candidate.warning] or candidates:
            best = capacity.fastest_of([candidate.layouts[0] for candidate in candidates], capacity.NEAR)
            chosen = next(candidate for candidate in candidates if candidate.layouts[0] is best)
        layouts = chosen.layouts
        resolved = chosen.fields | (layouts[0].fields if layouts else estimator.leanest())
        verdict = estimator.verdict(resolved, bounds.divided(resolved, nodes)[1])
        if chosen.warning:
            verdict = replace(verdict, warnings=(chosen.warning, *verdict.warnings))
        return resolved, verdict, [estimator.described(layout, resolved, steps) for layout in layouts]

    def _row_parts(self, resolved: dict[str, Any], box: BoxFacts) -> list[int]:
        """Return the numbers of ranks that may share a row: the requested number, else one and more."""
        first = resolved["sequence_parallel"]
        if self._is_set("sequence_parallel") or not self.method.sums or box.on_host:
            return [first]
        parts = [n for n in (2, 4, 8, 16, 32) if n <= box.node_devices and not resolved["lora_dropout"]]
        model = model_stats(self.context, self.base)
        return [first, *(n for n in parts if auto.shares_rows(model, resolved | {"sequence_parallel": n}))]

    def _is_set(self, name: str) -> bool:
        return self.hyperparameters.get(name, "auto") not in ("auto", None)


def model_stats(context: ControllerContext, base: Resolved) -> auto.ModelStats:
    """Return the facts about a base model and the box that `train.plan.auto` needs."""
    kind = context.scheduler.status()["devices"][0]["kind"]
    return auto.ModelStats(
        shape=shape_of(base),
        max_position_embeddings=base.model.max_model_len or DEFAULT_CONTEXT_TOKENS,
        device_kind=kind,
        # Training on an adapter uses base weights merged with it, which no engine serves.
        adapter_max_rank=0 if base.version.meta.get("adapter") else context.sizes.adapter_rank_limit(base.model),
        computes_bf16=kind_of(kind).computes_bf16(),
        quantised=base.quantization is not None,
    )


def shape_of(base: Resolved) -> ModelShape:
    """Return the shape from the version's config.json; without the model's files, only the number of parameters."""
    config = config_in(base.version.disk_path, base.version.shm_path)
    return ModelShape(base.model.params) if config is None else ModelShape.from_config(config, base.model.params)


def dataset_of(report: DataReport) -> auto.DatasetStats:
    return auto.DatasetStats(
        n_examples=max(1, report.n_rows, report.n_examples),
        n_tokens=max(1, report.n_tokens_estimate),
        longest_example_tokens=max(1, report.longest_example_tokens),
        lengths=tuple(report.example_tokens),
        documents=report.shape == TEXT,
    )


def box_facts(context: ControllerContext) -> BoxFacts:
    now = context.scheduler.status()
    memory, home = now["memory"], now["devices"][0]
    # Engines and jobs use only devices of the first device's kind.
    devices = [device for device in now["devices"] if device["kind"] == home["kind"]]
    return BoxFacts(
        devices=len(devices),
        node_devices=nodes_of(context).largest,
        device_kind=home["kind"],
        device_memory_bytes=min(device["memory_bytes"] for device in devices),
        device_name=home["name"],
        store_budget_bytes=memory["budget_bytes"],
        host_memory_bytes=memory["host_bytes"],
        asleep_per_device=memory["asleep_per_device"],
        store_room_bytes=memory["room_bytes"],
    )


def refuse_without_validation(resolved: dict[str, Any]) -> None:
    """Refuse settings that only a validation file can decide. Raises InvalidHyperparameter."""
    for name, needs_none in _NEED_NO_VALIDATION.items():
        if resolved[name] not in needs_none:
            expected = "another value, or a `validation_file` in the request, which this is measured on"
            raise InvalidHyperparameter(name, resolved[name], expected)


def cut_warning(method: Method, dataset: auto.DatasetStats, resolved: dict[str, Any]) -> list[str]:
    """Return a warning if max_length cuts examples of a counted dataset; prompts and documents are never cut."""
    longest, most = dataset.longest_example_tokens, resolved["max_length"]
    if longest <= most or method.rolls_out or dataset.documents:
        return []
    return [
        f"The longest example has {longest:,} tokens and max_length is {most:,}: what is beyond is cut off, and an "
        "example with nothing left to learn is left out, or refused by the method."
    ]


def tokenizer_of(context: ControllerContext, base: Resolved) -> Path | None:
    """Return the directory of the job's tokenizer and chat template; None while they are not on this machine."""
    version = _tokenizer_version(context, base)
    folders = (version.disk_path, version.shm_path) if version is not None else ()
    return next((Path(folder) for folder in folders if folder and has_tokenizer(Path(folder))), None)


def _tokenizer_version(context: ControllerContext, base: Resolved) -> VersionRow | None:
    if (below := base.version.meta.get("adapter")) is not None:
        return models.find_version(context.db, below["base"], below["base_version"])
    return base.version


# --- validation, before a job takes any device. A valid job gets its own copy of its data, as chat JSONL. After a crash
# validation runs again: the phase stays "validating" until everything is on disk.

_COPIES = {"training_file": "train.jsonl", "validation_file": "valid.jsonl"}
MOST_ROWS = 1_000_000
"""Rows of a file that are compared, the first ones: their hashes take some 100 MB."""
SHARED_SHARE = 0.1
"""The share of validation rows that are training rows too, from which a warning is given."""


class InvalidData(TaskFailed):
    """The data of a job cannot be used for training; `report` says where."""

    def __init__(self, param: str, file_id: str, report: DataReport, job_id: str):
        summary = storage.summary(report, f"appliance job logs {job_id}")
        super().__init__(f"invalid_{param}", f"The file {file_id} has {summary}", param)
        self.report = report


def remove_copies(context: ControllerContext, job_id: str) -> None:
    """Delete the copied data of a job that has ended."""
    for name in _COPIES.values():
        (context.jobs_dir / job_id / name).unlink(missing_ok=True)
    shutil.rmtree(context.jobs_dir / job_id / TOKENS, ignore_errors=True)


class JobValidation:
    """Validates jobs as tasks; file work happens on a thread. A job whose key ends is paused, not failed."""

    def __init__(self, context: ControllerContext):
        self._context, self._db = context, context.db
        context.tasks.add(Kind(VALIDATIONS, self.run, self.fail, at_once=8, per_owner=2))

    async def run(self, task: TaskRow) -> None:
        """Validate a job and queue it. Raises TaskFailed."""
        row = self._validating(task.id)
        if row is None:
            return
        try:
            await self._validate(row)
        except InvalidHyperparameter as error:
            raise TaskFailed("invalid_hyperparameter", str(error), error.param) from error
        except BadRequest as error:
            raise TaskFailed(error.code or "", error.message, error.param) from error
        except OSError as error:
            if is_full(error):
                raise
            raise _unreadable(error) from error
        self._ended(row.id)

    async def fail(self, task: TaskRow, error: TaskFailed) -> None:
        if self._validating(task.id) is not None:
            with self._db.transaction():
                if isinstance(error, InvalidData):
                    for line, reason in error.report.errors:
                        data = {"param": error.param, "line": line, "reason": reason, "of": error.report.n_errors}
                        add_message(self._db, task.id, f"line {line}: {reason}", level="error", data=data)
                fail(self._db, task.id, error.code, str(error), error.param)
        self._ended(task.id)

    def _ended(self, job_id: str) -> None:
        if (row := jobs.find(self._db, job_id)) is None or row.finished:
            remove_copies(self._context, job_id)
        self._context.scheduler.nudge(f"{job_id} was validated")

    def _validating(self, job_id: str) -> JobRow | None:
        """Return the job's current row; None if it was cancelled meanwhile."""
        row = jobs.find(self._db, job_id)
        return row if row is not None and row.phase == "validating" else None

    async def _validate(self, row: JobRow) -> None:
        """Check everything and queue the job. Raises TaskFailed, InvalidHyperparameter, BadRequest, OSError."""
        context, method = self._context, method_of(row.method)
        base = base_of(self._db, row)
        if base is None:
            raise _unreadable(f"the model {row.model} was deleted, or is not shared with the job's owner any more")
        if method.judged_by == "teacher":
            await self._check_teacher(row, base)
        folder, tokenizer = context.jobs_dir / row.id, await self._tokenizer(base)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        messages, reports = list[tuple[str, str]](), dict[str, DataReport]()
        paths = {param: folder / name for param, name in _COPIES.items() if getattr(row, param) is not None}
        for param, path in paths.items():
            file = self._file(getattr(row, param))
            source = context.files_dir / file.id
            report = await storage.checked(context, source, chat_path=path, method=method, tokenizer=tokenizer)
            if not report.ok:
                raise InvalidData(param, file.id, report, row.id)
            reports[param] = report
            for level, texts in (("warn", report.warnings), ("info", report.notes)):
                messages += [(level, f"{file.filename}: {text}") for text in texts]
        if "validation_file" in paths:
            compare = partial(_compare_rows, *paths.values())
            warning = await to_thread.run_sync(compare, limiter=context.file_threads)
            messages += [("warn", warning)] if warning else []
        dataset = dataset_of(reports["training_file"])
        bounds = DeviceBounds(row.min_devices, row.max_devices)
        request = SettingsRequest(context, base, method, row.hyperparameters, dataset, bounds)
        if tokenizer is not None and method.cut_refuses:
            fields = request.resolve()
            await self._check_cut(row, tokenizer, method.data_length(fields["max_length"], fields["options"]), reports)
        if (now := self._validating(row.id)) is None:
            return
        # Uses the current row: an operator may have changed it during the check.
        bounds = DeviceBounds(now.min_devices, now.max_devices)
        resolved, verdict, layouts = replace(request, bounds=bounds).choose()
        # Fixed from now on, so that a waiting job does not train a version made after the request.
        resolved = resolved | {"base_version": base.version.version}
        if not verdict.fits:
            instead = f" What would fit: {'; '.join(verdict.instead)}." if verdict.instead else ""
            raise TaskFailed("insufficient_memory", " ".join(verdict.problems) + instead)
        warnings = (*verdict.warnings, *cut_warning(method, dataset, resolved))
        messages += [("warn", text) for text in warnings]
        count = reports["training_file"].n_examples
        messages.append(("info", f"Files validated, {count} training examples, moving job to queued state"))
        with self._db.transaction():
            for level, text in messages:
                add_message(self._db, row.id, text, level=level)
            # Only sizes whose ranks fit their devices: on fewer devices the job would run out of memory midway.
            estimate = next(iter(layouts), {}) | {"memory": verdict.memory()}
            jobs.update(self._db, row.id, resolved=resolved, allowed_sizes=list(verdict.sizes), estimate=estimate)
            jobs.set_phase(self._db, row.id, "queued", reason="waiting for devices")

    async def _tokenizer(self, base: Resolved) -> Path | None:
        """Return the tokenizer's directory; loads a version that only a remote tier has. Raises OSError if memory is
        full."""
        context, folder = self._context, tokenizer_of(self._context, base)
        if folder is not None or (version := _tokenizer_version(context, base)) is None:
            return folder
        bring = partial(context.tiers.bring_in, name_of(version))
        try:
            path = (await to_thread.run_sync(bring, limiter=context.file_threads)).path
        except StoreFull as error:  # retried as for a full disk: without tokens the job could never start
            raise OSError(errno.ENOSPC, str(error)) from error
        except (LookupError, WeightsError):  # the start of the job reports it
            return None
        return path if has_tokenizer(path) else None

    async def _check_teacher(self, row: JobRow, student: Resolved) -> None:
        """Check that the teacher's tokenizer has the student's tokens. Raises TaskFailed."""
        context, judge = self._context, jobs.find_judge(self._db, row.id)
        name = judge.judge["teacher"] if judge is not None else ""
        teacher = resolve(self._db, name)
        ours = await self._tokenizer(student)
        theirs = await self._tokenizer(teacher) if teacher is not None else None
        if teacher is None:
            why = f"the teacher {name} was deleted"
        elif ours is None or theirs is None:
            why = f"the files of {name} or {student.name} are neither on disk nor in shared memory any more"
        else:
            compare = partial(differ, ours / TOKENIZER, theirs / TOKENIZER)
            why = await to_thread.run_sync(compare, limiter=context.file_threads)
            why = why and f"{name} cannot teach {student.name}: {why}"
        if why:
            raise TaskFailed("invalid_teacher", why, f"method.{row.method}.teacher")

    async def _check_cut(self, row: JobRow, tokenizer: Path, most: int, reports: dict[str, DataReport]) -> None:
        """Refuse lines that ranks would refuse only once they held devices. most: tokens per line. Raises
        InvalidData."""
        for param, report in reports.items():
            if report.longest_example_tokens <= most:
                continue
            context, file_id = self._context, self._file(getattr(row, param)).id
            how = {"method": method_of(row.method), "tokenizer": tokenizer, "cut_at": most}
            cut = await storage.checked(context, context.files_dir / file_id, **how)
            if not cut.ok:
                raise InvalidData(param, file_id, cut, row.id)

    def _file(self, file_id: str) -> FileRow:
        # Ignores the expiry: the file was valid when the job was created.
        row = files.find(self._db, file_id, viewer=None, now_s=0)
        if row is None:
            raise _unreadable(f"the file {file_id} was deleted")
        return row


def _compare_rows(training: Path, validation: Path) -> str:
    """Return a warning if both files share many rows, else "". Raises TaskFailed if they have the same rows,
    OSError."""
    trained, held_out = set(_hashes(training)), set(_hashes(validation))
    if held_out == trained:
        raise TaskFailed(
            "invalid_validation_file",
            "The validation file has the same examples as the training file, so its loss would only repeat the "
            "training loss. Give examples that are not trained on, or no validation_file.",
            "validation_file",
        )
    shared = len(held_out & trained)
    if not shared or shared < SHARED_SHARE * len(held_out):
        return ""
    return (
        f"{shared:,} of the {len(held_out):,} validation examples are training examples too: the validation loss looks "
        "better than it is. Keep them in one of the files."
    )


def _hashes(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        for line in islice(file, MOST_ROWS):
            yield blake2b(line, digest_size=8).digest()


def _unreadable(why: object) -> TaskFailed:
    return TaskFailed("file_unreadable", f"The data of the job could not be read: {why}", "training_file")
