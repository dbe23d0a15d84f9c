"""The numbers of docs/security.md are those of the code. Tests of a bound put a small number in its place, so a bound
that is a thousand times as large would pass them."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.controller.batches import followers
from appliance.controller.interfaces.config import RetentionSettings
from appliance.controller.jobs import requests
from appliance.controller.openai import model_routes
from appliance.gateway.http import certificates
from appliance.nodes import enrolment
from appliance.store import database, reading_threads
from runtime.network import newcomers
from train.plan import spec

SECURITY = Path(__file__).resolve().parents[2] / "docs" / "security.md"
KEPT = RetentionSettings()
KIB, MIB = 1 << 10, 1 << 20
NUMBERS = (
    ("that do not read hold 128 MiB of an owner together", followers.FOLLOWED_BYTES, 128 * MIB),
    ("with at most 100 others by name", model_routes.MAX_SHARED_WITH, 100),
    ("a job's hyperparameters are at most 16 KiB", requests.MOST_BYTES, 16 * KIB),
    ("a page of a list ends after 500 rows, 2 MiB of text", (database.PAGE_ROWS, database.PAGE_BYTES), (500, 2 * MIB)),
    ("of four such threads no owner has more than two", (reading_threads.THREADS, reading_threads.OF_ONE), (4, 2)),
    ("a job publishes 50 versions at most", spec.MOST_VERSIONS, 50),
    ("take 256 descriptors together", newcomers.MOST, 256),
    ("make room after 2 s", newcomers.GRACE_S, 2.0),
    ("one that expires within 14 days", certificates.SAID_BEFORE_S, 14 * 86400.0),
    ("good for 15 minutes, once", enrolment.TOKEN_LIFE_S, 15 * 60.0),
    ("of an owner's ended jobs the newest 2,000 stay", KEPT.jobs_per_owner, 2000),
    (
        "of ended batches and runs of evaluations the newest 10,000",
        (KEPT.batches_per_owner, KEPT.eval_runs_per_owner),
        (10_000, 10_000),
    ),
    ("of usage 400 days, of hand-overs 90 days", (KEPT.usage_days, KEPT.handovers_days), (400.0, 90.0)),
)


@pytest.mark.parametrize(
    ("words", "in_force", "said"), NUMBERS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_bound_is_as_large_as_it_is_said_to_be(words: str, in_force: object, said: object):
    assert words in SECURITY.read_text()
    assert in_force == said
