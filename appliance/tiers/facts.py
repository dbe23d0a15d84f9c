"""What retention has to know about versions and snapshots, read from the store's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from appliance.controller.access.naming import resolve
from appliance.store.database import Database
from appliance.store.objects import job_records, jobs, models
from appliance.store.records import canaries
from appliance.store.rows import JobRow, VersionRow
from weights.format.names import step_of
from weights.tiers.record import Name
from weights.tiers.retention import Kept


@dataclass(frozen=True)
class Facts:
    """`kept`: every version and snapshot that retention may judge. `over`: snapshots of jobs that have ended."""

    kept: dict[Name, Kept[Name]]
    over: frozenset[Name]
    rows: tuple[VersionRow, ...]


def read_facts(db: Database, created: Mapping[Name, float], is_held: Callable[[Name], bool]) -> Facts:
    """`created`: creation time of everything that any place holds. What no row knows is not judged."""
    unfinished = {row.id: row for row in jobs.list_unfinished(db)}
    rows = tuple(version for model in models.list_all(db) for version in models.list_versions(db, model.id))
    snapshots = [name for name in created if name.kind == "snapshot"]
    kept = {**_versions(db, rows, unfinished, is_held), **_snapshots(db, snapshots, unfinished, created)}
    over = {name for name in snapshots if name.model not in unfinished and jobs.find(db, name.model) is not None}
    return Facts(kept, frozenset(over), rows)


def _versions(
    db: Database, rows: tuple[VersionRow, ...], unfinished: Mapping[str, JobRow], is_held: Callable[[Name], bool]
) -> dict[Name, Kept[Name]]:
    losses = {(row.model, row.version): row.metrics.get("valid_loss") for row in job_records.list_checkpoints(db)}
    active = {row.id: row.active_version for row in models.list_all(db)}
    trained_from = {
        (found.model.id, (job.resolved or {}).get("base_version") or found.version.version)
        for job in unfinished.values()
        if (found := resolve(db, job.model)) is not None
    }
    below = {(known["base"], known["base_version"]) for row in rows if (known := row.meta.get("adapter"))}
    compared = {(canary.model, canary.version) for canary in canaries.list_running(db)}
    kept = {}
    for row in rows:
        name, version = name_of(row), (row.model, row.version)
        is_active = active.get(row.model) == row.version
        is_needed = is_active or bool(row.pinned) or version in trained_from | below | compared or is_held(name)
        # Checkpoints count by themselves: of three jobs under one name the "last three" are their results.
        family = f"{row.model} by epochs" if row.meta.get("of_epoch") else row.model
        kept[name] = Kept(name, family, row.created_s, losses.get(version), is_needed)
    return kept


def _snapshots(
    db: Database, names: list[Name], unfinished: Mapping[str, JobRow], created: Mapping[Name, float]
) -> dict[Name, Kept[Name]]:
    steps = {name: step for name in names if name.model in unfinished and (step := step_of(name.version)) >= 0}
    newest = {name.model: name for name in sorted(steps, key=lambda name: steps[name])}
    kept = {}
    for name, step in steps.items():
        metric = job_records.metric_at(db, name.model, step)
        loss = metric.valid_loss if metric is not None else None
        kept[name] = Kept(name, name.model, created[name], loss, protected=newest[name.model] == name)
    return kept


def name_of(row: VersionRow) -> Name:
    """How a version is known in every tier."""
    return Name("adapter" if row.meta.get("adapter") else "version", row.model, row.version)
