"""Runs a rank: a process forked from the warm parent, with a lifeline to its RankHost.

`main` joins the world; `prepare` builds everything that a run needs before its first step: tokens, model, engine,
state. All ranks of a world do this together, whether the job is new or resumes from a snapshot.

It answers two calls: `ping` (the phase and step of the run; the lifeline thread answers, so only a stopped process is
silent) and `suspend` (leave the device after the current micro-batch).

Every rank sends the events "ready", when its engine exists, and "done", with the outcome; rank 0 also sends the events
of the run.
"""

from __future__ import annotations

import gc
import time
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed import comm
from transformers import PreTrainedModel

from runtime.logs import configure_logging
from runtime.processes.lifeline import Lifeline
from train.control.rank import Events, Progress, Rank
from train.data.token_set import TokenSet
from train.methods.methods import method_of
from train.methods.packed_objective import PackedObjective
from train.model.model import keeps_state, load_model
from train.plan.errors import UnsupportedModel
from train.plan.spec import TrainSpec
from train.state import fragments
from train.state.publish import base_names
from train.trainer.engine import build_engine, init_world, meeting_url
from train.trainer.train import Run
from weights.format.errors import VersionNotFound
from weights.memory.locks import DirectoryLock
from weights.memory.store import WeightStore


def main(lifeline: Lifeline, args: dict[str, Any]) -> int:
    """`args`: spec (dict), rank, world_size, snapshot (path or None), meeting (path of the file where the world meets).
    torch.distributed reads the rest from the environment."""
    spec = TrainSpec.from_dict(args["spec"])
    configure_logging("rank", job_id=spec.job_id, rank=args["rank"])
    progress = Progress()
    lifeline.serve({"ping": progress.report, "suspend": progress.ask_suspend})
    progress.enter("joining")
    meeting = meeting_url(args["meeting"], args["rank"], args["world_size"])
    init_world(spec.device_kind, meeting)
    _base = hold_base(spec)
    run = prepare(spec, lifeline.emit, progress, args["snapshot"])
    # Engine and model live until the process ends: a pass of the collector would cost time and free nothing.
    gc.collect()
    gc.freeze()
    lifeline.emit("ready", step=run.step)
    outcome = run.run()
    progress.enter("done", run.step)
    run.metrics.close()
    seconds = {**outcome.pop("seconds", {}), "leave": time.monotonic() - run.ended_s}
    lifeline.emit("done", seconds=seconds, **outcome)
    return 0


def hold_base(spec: TrainSpec) -> list[DirectoryLock]:
    """Lock the directories of the base and its adapter in the store for the life of the rank. Raises VersionNotFound.

    Frozen weights stay mapped from their files, and the store reuses the files of unlocked versions. Locking a
    directory outside the store is harmless.
    """
    held = []
    for path in filter(None, (spec.base_path, spec.base_adapter)):
        lock = DirectoryLock.try_shared(Path(path))
        if lock is None:
            raise VersionNotFound(f"{path}, the starting point of {spec.job_id}, was removed or is being removed")
        held.append(lock)
    return held


def prepare(spec: TrainSpec, emit: Events, progress: Progress, snapshot_path: str | None = None) -> Run:
    """Collective: prepare data, model, engine, and the state in `snapshot_path` if given. Only the first rank calls
    `emit`. Raises every TrainError of these parts."""
    rank = comm.get_rank()
    store = WeightStore(Path(spec.shm_root), budget_bytes=spec.shm_budget_bytes)
    progress.enter("loading")
    method = method_of(spec.method)
    report = emit if rank == 0 else lambda event, **data: None
    most = method.data_length(spec.max_length, spec.options)
    open_set = partial(TokenSet, method=method, max_length=most, packing=spec.packing)
    train, valid = open_set(spec.train_path), open_set(spec.valid_path) if spec.valid_path else None
    if snapshot_path is None:
        _report_data(report, spec, train)

    # Under ZeRO-3 the first rank (or the first tensor-parallel group) sends every parameter to all others (zero.Init).
    # If the others loaded the weights too, they would read them for nothing, and hold a copy in host memory where
    # loading makes one: to fuse experts, or to change the precision.
    sent = spec.zero_stage == 3 and rank >= spec.tensor_parallel
    model = load_model(spec, weights=snapshot_path is None, sent=sent)
    refuse_shared_rows(model, spec)
    engine = build_engine(PackedObjective(model, method, spec.options), spec)
    if snapshot_path is None and spec.published_kind == "version":
        base_names(engine, spec.base_path)  # raises before the first step, not at the first publish
    run = Run(Rank(spec, store, engine, fragments.grid(engine), report, progress), train, valid)
    if snapshot_path:
        run.resume_from(snapshot_path)
    return run


def refuse_shared_rows(model: PreTrainedModel, spec: TrainSpec) -> None:
    """Raises UnsupportedModel if sequences would share a row of a model whose layers pass a state from token to token:
    each sequence would begin with the last state of the sequence before it."""
    method = method_of(spec.method)
    alone = not spec.packing and spec.micro_batch == 1 and method.sequences == 1 and not method.rolls_out
    alone = alone and spec.sequence_parallel == 1
    if keeps_state(model) and not alone:
        raise UnsupportedModel(
            f"{model.config.get_text_config().model_type} has layers that keep a state from token to token (mamba, "
            "linear attention, convolutions), which would leak between examples in one row: train it with the method "
            "'supervised', packing false, micro_batch 1 and sequence_parallel 1"
        )


def _report_data(emit: Events, spec: TrainSpec, train: TokenSet) -> None:
    """Report what a new job trains on, with warnings about examples that were cut or left out."""
    method, packs, batch = method_of(spec.method), len(train.packs), spec.batch_size
    steps = -(-packs * spec.n_epochs // batch)
    text = f"{train.n_examples} examples, {train.n_tokens} tokens"
    if (rows := train.n_examples + train.n_dropped) > train.n_records and method.sequences == 1:
        text = (
            f"{train.n_records} examples became {rows} rows: the model's chat template renders earlier turns "
            f"differently from the last one, so each turn is trained in a row of its own; {train.n_tokens} tokens"
        )
    if spec.packing:
        fill = train.n_tokens / (packs * train.capacity)
        text += f", packed into {packs} sequences of {train.capacity} ({fill:.0%} full)"
    answers = f", with {spec.options['group']} answers to each" if method.rolls_out else ""
    text += f": {batch} of them per step (batch_size){answers}, {steps} steps in all (n_epochs {spec.n_epochs})"
    emit("message", level="info", text=text)
    if effort := spec.options.get("reasoning_effort"):
        text = f"reasoning_effort {effort!r} is ignored: models of this box reason as they were trained to"
        emit("message", level="warn", text=text)
    if train.n_truncated or train.n_dropped:
        text = f"{train.n_truncated} examples were cut to max_length {spec.max_length} tokens; {train.n_dropped} were "
        text += "left out because the cut removed everything to be learnt"
        if method.rolls_out:
            text = f"{train.n_dropped} prompts were left out: they are longer than {train.capacity} tokens, which is "
            text += f"max_length {spec.max_length} less max_completion_tokens"
        emit("message", level="warn", text=text)
