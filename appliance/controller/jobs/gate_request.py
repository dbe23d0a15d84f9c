"""Defines the gate in a job's request; appliance.controller.gates checks what it names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from appliance.controller.http.strict_body import StrictBody

MAX_SUITES = 16
Share = Annotated[float, Field(ge=0, le=1)]
Margin = Annotated[float, Field(ge=-1e6, le=1e6)]
Measure = Literal["pass_rate", "mean_reward"]


class GateRules(StrictBody):
    """What is asked of a version: see gates.verdict.Rules."""

    pass_rate_at_least: Share | None = None
    mean_reward_at_least: Margin | None = None
    not_worse_by: Annotated[float, Field(ge=0, le=1e6)] | None = None
    better_by: Margin | None = None
    measure: Measure | None = None


RULES = tuple(GateRules.model_fields)


class GateSuite(GateRules):
    """An evaluation that exists, the data it is run on, and what is asked of the version.

    data_source: as a run of an evaluation has it, without `model`; None: that of the evaluation's newest run in which a
    model answered items of a file. criterion: the grader that counts; None: all, and the mean of their rewards."""

    eval_id: Annotated[str, Field(min_length=1, max_length=256)]
    data_source: dict[str, Any] | None = None
    criterion: Annotated[str, Field(max_length=512)] | None = None
    measure: Measure = "pass_rate"

    @model_validator(mode="after")
    def _shares(self) -> GateSuite:
        for name in ("not_worse_by", "better_by"):
            margin = getattr(self, name)
            if margin is not None and self.measure == "pass_rate" and not -1 < margin < 1:
                raise ValueError(f"{name} is a share of the items where pass rates are compared: -1 to 1")
        return self


class GateCanary(StrictBody):
    """As `appliance model canary` has them; min_requests 0: its time alone decides."""

    share: Annotated[float, Field(gt=0, le=0.9)] = 0.1
    watch_s: Annotated[float, Field(gt=0, le=30 * 86400)] = 600.0
    min_requests: Annotated[int, Field(ge=0, le=1_000_000)] = 50


class GateRequest(StrictBody):
    """then: what happens to a version that passes. "hold": nothing, the verdict is recorded."""

    suites: Annotated[list[GateSuite], Field(min_length=1, max_length=MAX_SUITES)]
    level: Annotated[float, Field(gt=0, le=0.5)] = 0.05
    then: Literal["activate", "canary", "hold"] = "activate"
    canary: GateCanary | None = None
