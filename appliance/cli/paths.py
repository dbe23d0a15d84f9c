"""Paths of the admin API and of the OpenAI surface that more than one command uses."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

JOBS = "/v1/fine_tuning/jobs"


def segment(name: str) -> str:
    """A name as one segment of a path: model names hold ":" and may hold "/"."""
    return quote(name, safe="")


def _below(collection: str) -> Callable[[str], str]:
    return lambda name: f"{collection}/{segment(name)}"


job, admin_job, model = _below(JOBS), _below("/admin/v1/jobs"), _below("/admin/v1/models")
file, batch, evaluation = _below("/v1/files"), _below("/v1/batches"), _below("/v1/evals")
