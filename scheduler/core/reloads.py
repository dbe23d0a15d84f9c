"""Remembers which models have engines that cannot load a version while they run, so that nobody asks them again: they
are started anew instead, for another version as after a pause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scheduler.core.failures import first_line
from scheduler.core.workload import DeploymentView, Workload


@dataclass(frozen=True, slots=True)
class _Refused:
    """`build`: how the engines were set up. `version`: the only one that they did not take; None: they take none."""

    build: tuple[str, int]
    version: str | None
    reason: str


class Reloads:
    """What engines did not load, by model. Lives in the loop's memory: a restarted controller tries once more."""

    def __init__(self) -> None:
        self._refused: dict[str, _Refused] = {}

    def refused(self, deployment: DeploymentView, version: str, reason: str, *, whole: bool) -> None:
        """A running engine did not take the version. whole: it would take no other either."""
        known = self._refused.get(deployment.model)
        whole = whole or (known is not None and known.build == _build(deployment) and known.version is None)
        self._refused[deployment.model] = _Refused(
            _build(deployment), None if whole else version, f"{version} could not be loaded: {first_line(reason)}"
        )

    def shown(self, deployment: DeploymentView) -> DeploymentView:
        """The deployment, with why its engines are started anew where they are."""
        known = self._refused.get(deployment.model)
        if known is None or known.build != _build(deployment) or known.version not in (None, deployment.version):
            return deployment
        return replace(deployment, anew=known.reason, wakes=known.version is not None)

    def notes(self, workload: Workload) -> Iterator[tuple[str, str]]:
        """(model, sentence without a full stop) for users."""
        for deployment in map(self.shown, workload.deployments):
            if not deployment.wakes:
                yield deployment.model, f"a new engine for each version and after each pause, because {deployment.anew}"
            elif deployment.anew:
                yield deployment.model, f"a new engine for {deployment.version}, because {deployment.anew}"

    def keep(self, workload: Workload) -> None:
        """Forget models that are no longer in the workload."""
        if self._refused:
            there = {deployment.model for deployment in workload.deployments}
            self._refused = {model: known for model, known in self._refused.items() if model in there}


def _build(deployment: DeploymentView) -> tuple[str, int]:
    return deployment.settings, deployment.tensor_parallel
