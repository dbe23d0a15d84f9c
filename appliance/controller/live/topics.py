"""Topics of the event stream: which rows each covers, and whose changes a key receives. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from appliance.controller.interfaces.principal import FINE_TUNING, INFERENCE, READ, Principal
from appliance.store.row_changes import Watched


class Topic(NamedTuple):
    """all: the scope that hears of everybody's, None: admin alone; own: the one that hears of its owner's."""

    all: str | None
    own: str | None = None


TOPICS: Final[Mapping[str, Topic]] = {
    "box": Topic(READ),
    "handovers": Topic(READ),
    "jobs": Topic(READ, FINE_TUNING),
    "models": Topic(READ),
    "files": Topic(None, FINE_TUNING),
    "evals": Topic(None, FINE_TUNING),
    "batches": Topic(None, INFERENCE),
    "keys": Topic(None),
    "audit": Topic(None),
}

_OF_JOB: Final = Watched("ROW.job_id", "(SELECT owner FROM main.jobs WHERE id = ROW.job_id)")
_OWNED: Final = Watched("ROW.id", "ROW.owner")
_OF_MODEL: Final = Watched("ROW.model")
# Table -> its topic, and what is told of a row.
TABLES: Final[Mapping[str, tuple[str, Watched]]] = {
    "jobs": ("jobs", _OWNED),
    "job_events": ("jobs", _OF_JOB),
    "job_metrics": ("jobs", _OF_JOB),
    "checkpoints": ("jobs", _OF_JOB),
    "handovers": ("handovers", Watched("ROW.id")),
    "handover_steps": ("handovers", Watched("ROW.handover_id")),
    "models": ("models", Watched("ROW.id")),
    "versions": ("models", _OF_MODEL),
    "deployments": ("models", _OF_MODEL),
    "canaries": ("models", _OF_MODEL),
    "model_settings": ("models", _OF_MODEL),
    "files": ("files", _OWNED),
    "evals": ("evals", _OWNED),
    "eval_runs": ("evals", Watched("ROW.eval_id", "ROW.owner")),
    "batches": ("batches", _OWNED),
    "keys": ("keys", Watched("ROW.id")),
    "audit": ("audit", Watched("ROW.id")),
    "windows": ("box", Watched()),
}


def hears(caller: Principal, topic: str, owner: str | None) -> bool:
    """Whether it hears of a change of this owner's; None: of one that is nobody's."""
    all_of, own = TOPICS[topic]
    if caller.is_admin or (all_of is not None and caller.may(all_of)):
        return True
    return owner is not None and owner == caller.owner and own is not None and caller.may(own)
