"""What an import makes of how a forked comparison ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from appliance.models.checkpoint_trial import WarmParent, begun
from appliance.models.errors import TrialEnded
from weights.checkpoint.errors import NotACheckpoint


class Child:
    """A forked process that tells one event, or none."""

    def __init__(self, event: dict[str, Any] | None):
        self._event = event

    async def spawn(self, *_: Any, **__: Any) -> Child:
        return self

    async def next_event(self) -> dict[str, Any] | None:
        return self._event

    async def kill_and_wait(self) -> None:
        pass

    async def how_it_ended(self) -> str:
        return "was killed (SIGKILL)"


@pytest.mark.parametrize(
    ("event", "refusal"),
    [
        (None, TrialEnded),
        ({"event": "fatal", "message": "no such module"}, NotACheckpoint),
        ({"event": "compared", "found": {"unfit": "no such activation"}}, NotACheckpoint),
    ],
    ids=["killed", "failed", "unfit"],
)
def test_result_without_a_comparison_raises_what_ended_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: dict[str, Any] | None, refusal: type[Exception]
) -> None:
    monkeypatch.setattr("appliance.models.checkpoint_trial.Child", Child(event))
    with begun(WarmParent("warm.sock", tmp_path / "log")) as trial, pytest.raises(refusal):
        trial.result(tmp_path, "LlamaForCausalLM")
