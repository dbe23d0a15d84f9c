"""What a snapshot holds, and how it is read: a run's state by parameter in shared memory. Each rank writes its
fragments; any world size and any tensor-parallel size can read it.

A snapshot holds, for every trained parameter, `master.<name>`, `exp_avg.<name>` and `exp_avg_sq.<name>` whole, in
float32 and in the parameter's shape, the tensors that the run keeps from its beginning (`Kept`), and in its meta what
the loop needs: the step. Data position, order, learning rate and random streams are functions of the step and the
spec, so there is nothing else to keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm

from train.plan.errors import SnapshotMismatch
from train.plan.spec import TrainSpec
from train.state import copies, fragments
from train.state.copies import Piece
from train.state.fragments import Fragment
from train.state.writing import Written, write_together
from weights.format.errors import IntegrityError, StoreError
from weights.format.layout import Layout, TensorSpec
from weights.format.names import version_name
from weights.format.torch_views import Strided, as_tensor
from weights.memory.lease import StoredVersion
from weights.memory.store import Draft, WeightStore

KIND = "snapshot"
PARTS = ("master", *fragments.MOMENTS)
Kept = Mapping[str, torch.Tensor]  # float32, by name, equal on every rank

# Fields that must be equal for the continued run to be the same run.
_IDENTITY = ("seed", "batch_size", "micro_batch", "max_length", "packing", "n_epochs", "full", "lora_rank")


def snapshot_layout(engine: Any, kept: Kept) -> Layout:
    """The layout of a snapshot; the same on every rank and for every step of a run."""
    trained = [p for p in fragments.parameters(engine) if p.trained]
    state = [TensorSpec(f"{part}.{p.name}", "F32", p.shape) for part in PARTS for p in trained]
    return Layout.plan([*state, *(TensorSpec(name, "F32", tuple(tensor.shape)) for name, tensor in kept.items())])


def _written(engine: Any, kept: Kept) -> Iterator[Piece]:
    """What this rank writes; `kept` by the first rank."""
    assert fragments.has_moments(engine), "a snapshot before the first step would hold undefined bytes"
    yield from _pieces(fragments.written(engine, fragments.trained_fragments(engine)))
    if comm.get_rank() == 0:
        yield from ((name, Strided(0, t.numel(), t.numel(), 1), t.view(-1)) for name, t in kept.items())


def read_kept(store: WeightStore, path: str | Path, name: str) -> torch.Tensor | None:
    """A copy of a tensor of the snapshot at `path` that its run keeps; None if it has none of this name. Raises
    SnapshotMismatch."""
    with store.lease(_stored(path)) as lease:
        shape = next((placed.spec.shape for placed in lease.layout if placed.spec.name == name), None)
        return None if shape is None else as_tensor(lease.view(name), "F32", shape).clone()


def write_snapshot(
    engine: Any, spec: TrainSpec, store: WeightStore, layout: Layout, kept: Kept, *, step: int, tokens: str
) -> Written:
    """Collective: write the state after `step` steps, at least one of which was done. tokens: digest of the training
    data's tokens. Raises as `write_together`."""

    def reserve() -> Draft:
        if stale := store.find(KIND, spec.job_id, version_name(step)):
            store.remove(stale)
        return store.reserve(layout, kind=KIND, model=spec.job_id, version=version_name(step))

    meta = {"step": step, "spec": {key: getattr(spec, key) for key in _IDENTITY}, "tokens": tokens}
    return write_together(store, layout, reserve, lambda draft: copies.write(draft, _written(engine, kept)), meta)


def read_snapshot(engine: Any, spec: TrainSpec, store: WeightStore, path: str | Path, tokens: str) -> int:
    """Collective: fill the engine with the snapshot at `path`, written at any world size; returns its step. tokens:
    digest of the training data's tokens.

    Raises SnapshotMismatch if it is gone or belongs to another run.
    """
    stored = _stored(path)
    meta = stored.manifest.meta
    for key in _IDENTITY:
        if meta["spec"][key] != getattr(spec, key):
            raise SnapshotMismatch(
                f"the snapshot {path} was made with {key}={meta['spec'][key]!r}, the run has {getattr(spec, key)!r}"
            )
    if meta["tokens"] != tokens:
        raise SnapshotMismatch(
            f"the snapshot {path} was made with other tokens of the training data; did the tokenizer or the chat "
            "template of the base model change?"
        )
    step = int(meta["step"])
    with store.lease(stored) as lease, torch.no_grad():
        shapes = {placed.spec.name: placed.spec.shape for placed in lease.layout}
        trained = [parameter for parameter in fragments.parameters(engine) if parameter.trained]
        for parameter in trained:
            if shapes.get(f"master.{parameter.name}") != parameter.shape:
                raise SnapshotMismatch(
                    f"the snapshot {path} has {shapes.get(f'master.{parameter.name}')} for {parameter.name}, the model "
                    f"{parameter.shape}; it belongs to another model or other LoRA targets"
                )
        fragments.create_moments(engine, step)
        copies.read(lease, _pieces(fragments.trained_fragments(engine)))
        if fragments.is_zero3(engine):
            fragments.gather_weights(engine)
        else:  # at a fraction of what an all-gather through gloo costs
            copies.read(lease, ((f"master.{p.name}", p.held, p.tensor.data.view(-1)) for p in trained))
    engine.global_steps = step
    engine.global_samples = step * spec.batch_size
    return step


def _stored(path: str | Path) -> StoredVersion:
    try:
        return StoredVersion.read(Path(path))
    except IntegrityError as error:
        raise SnapshotMismatch(f"no snapshot at {path}; it was removed or never committed") from error


def disk_store(spec: TrainSpec) -> WeightStore:
    """The store for snapshots when shared memory is full: the same format in the job's directory."""
    return WeightStore(Path(spec.run_dir) / "snapshots", budget_bytes=None)


def store_of(path: str | Path, shared: WeightStore, spec: TrainSpec) -> WeightStore:
    """The store that holds the snapshot at `path`."""
    return shared if Path(path).is_relative_to(shared.root) else disk_store(spec)


def _pieces(owned: Iterable[Fragment]) -> Iterator[Piece]:
    for fragment in owned:
        assert fragment.moments.keys() == set(fragments.MOMENTS)
        for part, ours in (("master", fragment.weights), *fragment.moments.items()):
            for runs, elements in fragment.pieces():
                yield f"{part}.{fragment.name}", runs, ours[elements]


def forget_older(store: WeightStore, spec: TrainSpec) -> None:
    """Remove all snapshots of the job but the newest, which is kept while a further one is written. Call it on one
    rank."""
    of_job = [stored for stored in store.list(KIND) if stored.model == spec.job_id]
    of_job.sort(key=lambda stored: stored.manifest.meta["step"], reverse=True)
    for stored in of_job[1:]:
        try:
            store.remove(stored)
        except StoreError:  # leased by a copy to disk: the next snapshot tries again
            continue
