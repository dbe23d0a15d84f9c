"""What a snapshot holds, and how it is read: a run's state by parameter in shared memory. Each rank writes its
fragments (saving.py says when); any world size and any tensor-parallel size can read it.

A snapshot holds, for every trained parameter, `master.<name>`, `exp_avg.<name>` and `exp_avg_sq.<name>` whole, in
float32 and in the parameter's shape, the tensors that the run keeps from its beginning (`Kept`), and in its meta what
the loop needs: the step. Data position, order, learning rate and random streams are functions of the step and the
spec, so there is nothing else to keep.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from deepspeed import comm

from runtime.devices.kinds import in_host_memory
from train.control.rank_messages import broadcast_json
from train.plan.errors import SnapshotMismatch
from train.plan.spec import TrainSpec
from train.state import fragments
from train.state.copies import CopyPlan
from train.state.fragments import Fragment
from train.state.writing import Writing
from weights.format.errors import IntegrityError, StoreError, error_as_json, error_from_json
from weights.format.layout import Layout, TensorSpec
from weights.format.names import version_name
from weights.format.slices import Strided
from weights.format.torch_views import as_tensor, runs_view
from weights.memory.draft import Draft
from weights.memory.lease import StoredVersion
from weights.memory.store import WeightStore

KIND = "snapshot"
FORMAT = 1
PARTS = ("master", *fragments.MOMENTS)
Kept = Mapping[str, torch.Tensor]  # float32, by name, equal on every rank
NOTHING: Kept = MappingProxyType({})
_CAST_ELEMENTS = 2**24  # on a device at a time

# Fields that must be equal for the continued run to be the same run.
_IDENTITY = ("seed", "batch_size", "micro_batch", "max_length", "packing", "n_epochs", "full", "lora_rank")


def snapshot_layout(engine: Any, kept: Kept = NOTHING) -> Layout:
    """The layout of a snapshot; the same on every rank and for every step of a run.

    Each part in the optimizer's order of parameters (train.run.engine gives it matrices before vectors where it has two
    groups, and what ends unevenly last): then what ZeRO keeps end to end lies end to end here too.
    """
    trained = [p for p in fragments.parameters(engine) if p.trained]
    trained.sort(key=lambda p: fragments.ends_unevenly(p.shape))
    if len(engine.optimizer.optimizer.param_groups) > 1:
        trained.sort(key=lambda p: len(p.shape) < 2)
    state = [TensorSpec(f"{part}.{p.name}", "F32", p.shape) for part in PARTS for p in trained]
    return Layout.plan([*state, *(TensorSpec(name, "F32", tuple(tensor.shape)) for name, tensor in kept.items())])


def plan_of_written(engine: Any, layout: Layout, kept: Kept = NOTHING) -> CopyPlan:
    """What this rank writes into a snapshot, for as long as the engine lives; `kept` by the first rank. After the first
    step, or a resume."""
    assert fragments.has_moments(engine), "a snapshot before the first step would hold undefined bytes"
    pieces = [*_pieces(fragments.written(engine, fragments.trained_fragments(engine)))]
    if comm.get_rank() == 0:
        pieces += [(name, Strided(0, t.numel(), t.numel(), 1), t.view(-1)) for name, t in kept.items()]
    return CopyPlan.of(layout, pieces)


def read_kept(store: WeightStore, path: str | Path, name: str) -> torch.Tensor | None:
    """A copy of a tensor of the snapshot at `path` that its run keeps; None if it has none of this name. Raises
    SnapshotMismatch."""
    with store.lease(_stored(path)) as lease:
        shape = next((placed.spec.shape for placed in lease.layout if placed.spec.name == name), None)
        return None if shape is None else as_tensor(lease.view(name), "F32", shape).clone()


def reserve_snapshot(
    spec: TrainSpec, store: WeightStore, layout: Layout, step: int, world_size: int, draft: str | None = None
) -> Draft:
    """For one rank. Raises as `WeightStore.reserve`."""
    stale = store.find(KIND, spec.job_id, version_name(step))
    if stale:
        store.remove(stale)
    return store.reserve(
        layout, kind=KIND, model=spec.job_id, version=version_name(step), writers=world_size, name=draft
    )


def begin_snapshot(
    engine: Any,
    spec: TrainSpec,
    store: WeightStore,
    layout: Layout,
    step: int,
    pace_s: float | None = None,
    *,
    plan: CopyPlan | None = None,
    draft: Draft | None = None,
) -> Writing:
    """All ranks copy their fragments by `plan` (`plan_of_written`); `finish` commits. `step` is the number of steps
    done. With `pace_s` the copy goes on beside the next step, until its optimizer is due.

    Collective where no `draft` is given; then StoreFull is raised, on every rank, where the store has no room.
    """
    began = time.perf_counter()
    plan = plan or plan_of_written(engine, layout)
    world_size = comm.get_world_size()
    if draft is None:
        draft = reserve_together(store, lambda: reserve_snapshot(spec, store, layout, step, world_size), layout)
    meta = {
        "format": FORMAT,
        "step": step,
        "world_size": world_size,
        "zero_stage": spec.zero_stage,
        "tensor_parallel": spec.tensor_parallel,
        "loss_scale": 1.0,
        "spec": {key: getattr(spec, key) for key in _IDENTITY},
    }
    return Writing(draft, lambda: plan.write(draft), elements=plan.elements, meta=meta, began=began, pace_s=pace_s)


def read_snapshot(engine: Any, spec: TrainSpec, store: WeightStore, path: str | Path) -> int:
    """Collective: fill the engine with the snapshot at `path`, written at any world size; returns its step.

    Raises SnapshotMismatch if it is gone or belongs to another run.
    """
    stored = _stored(path)
    meta = stored.manifest.meta
    for key in _IDENTITY:
        if meta["spec"][key] != getattr(spec, key):
            raise SnapshotMismatch(
                f"the snapshot {path} was made with {key}={meta['spec'][key]!r}, the run has {getattr(spec, key)!r}"
            )
    step = int(meta["step"])
    with store.lease(stored) as lease, torch.no_grad():
        shapes = {placed.spec.name: placed.spec.shape for placed in lease.layout}
        for parameter in fragments.parameters(engine):
            if parameter.trained and shapes.get(f"master.{parameter.name}") != parameter.shape:
                raise SnapshotMismatch(
                    f"the snapshot {path} has {shapes.get(f'master.{parameter.name}')} for {parameter.name}, the model "
                    f"{parameter.shape}; it belongs to another model or other LoRA targets"
                )

        def whole(name: str) -> torch.Tensor:
            return as_tensor(lease.view(name), "F32", (math.prod(shapes[name]),))

        fragments.create_moments(engine, step)
        CopyPlan.of(lease.layout, _pieces(fragments.trained_fragments(engine))).read(lease)
        fragments.refresh_low_precision(engine, lambda name: whole(f"master.{name}"))
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


def reserve_together(store: WeightStore, reserve: Callable[[], Any], layout: Layout) -> Any:
    """Rank 0 calls `reserve()`, all attach to the draft. An error on rank 0 is raised on every rank."""
    outcome, draft = None, None
    if comm.get_rank() == 0:
        try:
            draft = reserve()
            outcome = {"draft": str(draft.path)}
        except StoreError as error:
            outcome = {"error": error_as_json(error)}
    outcome = broadcast_json(outcome)
    if "error" in outcome:
        raise error_from_json(outcome["error"])
    return draft if draft is not None else store.attach(outcome["draft"], layout)


def write_runs(draft: Any, name: str, runs: Strided, source: torch.Tensor) -> None:
    """Copy `source` (n,) into the elements `runs`, n in all, of tensor `name`, cast to the tensor's dtype."""
    spec = draft.layout.find(name).spec
    whole = as_tensor(draft.view(name), spec.dtype, (math.prod(spec.shape),))
    target, source = runs_view(whole, runs), source.view(runs.count, runs.run)
    if in_host_memory(source.device) or source.dtype == target.dtype:
        target.copy_(source)
        return
    # torch copies as it is stored and casts on the host, by way of another buffer there: twice the bytes over the link.
    rows = max(1, _CAST_ELEMENTS // runs.run)
    for ours, theirs in zip(source.split(rows), target.split(rows), strict=True):
        for piece, place in zip(ours.split(_CAST_ELEMENTS, 1), theirs.split(_CAST_ELEMENTS, 1), strict=True):
            place.copy_(piece.to(target.dtype))


def _pieces(owned: Iterable[Fragment]) -> Iterator[tuple[str, Strided, torch.Tensor]]:
    for fragment in owned:
        assert fragment.moments.keys() == set(fragments.MOMENTS)
        for part, ours in (("master", fragment.weights), *fragment.moments.items()):
            for runs, elements in fragment.pieces():
                yield f"{part}.{fragment.name}", runs, ours[elements]


def _of_job(store: WeightStore, job_id: str) -> Iterable[Any]:
    return [stored for stored in store.list(KIND) if stored.model == job_id]


def forget_older(store: WeightStore, spec: TrainSpec) -> None:
    """Remove the job's snapshots except the newest `keep_snapshots`. Call it on one rank."""
    of_job = sorted(_of_job(store, spec.job_id), key=lambda s: s.manifest.meta["step"], reverse=True)
    for stored in of_job[spec.keep_snapshots :]:
        try:
            store.remove(stored)
        except StoreError:  # leased by a copy to disk: the next snapshot tries again
            continue
