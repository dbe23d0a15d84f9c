"""What grows on the loop, and what bounds it: by patterns of names of requests and rounds, the counts that grow."""

from __future__ import annotations

from collections.abc import Mapping

from tests.unit.loop_cost.meter import COUNTS

TOGETHER = frozenset(COUNTS)
"""Some at a time: more turns of the loop, and none of them longer."""
AT_ONCE = TOGETHER | {f"{one} at once" for one in COUNTS}

GROWS: Mapping[str, tuple[frozenset[str], str]] = {
    "round: the scheduler reads the store": (AT_ONCE, "models that are deployed: bounds.models, 200 of an owner's"),
    "round: the table of models": (AT_ONCE, "the table itself, which Quotas.check_names bounds by bus_line_bytes"),
    "(round: the table of keys|(POST|PATCH|DELETE) /admin/v1/(keys|session-keys|sessions))": (
        AT_ONCE,
        "the table of keys itself: administrators make keys, and each person who comes by a login provider has one",
    ),
    "round: housekeeping": (TOGETHER, "keys, one after the other"),
    "round: gates": (AT_ONCE, "ended jobs whose gate is open, of each owner bounds.jobs"),
    "POST /v1/uploads/.*/complete": (AT_ONCE, "the request names each part: upload_routes.MAX_PARTS, 10,000"),
    "POST /internal/responses": (AT_ONCE, "stored.MAX_TURNS, 2,000"),
    "GET /internal/responses/context": (TOGETHER, "stored.MAX_TURNS, one at a time"),
    "POST /v1/fine_tuning/jobs$": (AT_ONCE, "an owner's models: bounds.models, 200"),
    "POST /v1/evals(/.*/runs)?$": (AT_ONCE, "bounds.evals, 500"),
    "DELETE /v1/evals": (TOGETHER, "chunks.CHUNK_ROWS at a time"),
    "DELETE /admin/v1/models/{model-0}$": (TOGETHER, "chunks.CHUNK_ROWS versions at a time"),
    "POST /admin/v1/forget": (AT_ONCE, "an administrator forgets a person, once: each model goes at once"),
}

REFUSED: Mapping[str, str] = {
    "after=nobodys": "a cursor that is nowhere, for which all turns are looked through",
    "(ann|bob): GET /admin/v1/metrics": "not an owner's",
    "POST /admin/v1/oidc": "there is no provider",
    "admin: POST /admin/v1/sessions/.*/touch": "a login of somebody else's",
    "DELETE /admin/v1/nodes/{n9}": "none is lost",
    "DELETE /admin/v1/models/{model-0}/canary": "it was promoted",
}

HOLDS: Mapping[str, str] = {
    "POST /internal/responses  any numbers": "a gateway's, which are trusted: no list of numbers comes from there",
}
"""Bodies that may hold the loop for longer than test_object_size says, and why."""

HOLDS_UNFINISHED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "round: the scheduler reads the store": (
        ("calls", "steps"),
        "all jobs that have not ended, of each owner bounds.jobs",
    ),
    "canaries end": (("calls",), "scipy is imported once, on a thread"),
}
"""The same of what has not ended: what happens, of what it may be more, and what bounds that."""
