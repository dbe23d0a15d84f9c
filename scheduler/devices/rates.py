"""Decides whether a device that was measured is sound: a pure function of what it reached, what it reached before, and
what is published of its kind.

Rules
- A device that computes or copies wrong is broken: it stays out of use until a person puts it back.
- Less than what is published for it, or than 95 % of its own baseline (the bound of Microsoft's SuperBench for a
  defect), is a fault that may pass, such as heat or a neighbour on the same switch.
- Devices of the host share its processors with all that runs there. A rate says as much about the others: less than
  half of the baseline is said, and nothing is done about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scheduler.devices.health import Fault

OF_BASELINE = 0.95
OF_BASELINE_ON_HOST = 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """One measure, as a person reads it. `state`: "warn" is said, "fail" keeps the device out of use."""

    measure: str
    state: Literal["ok", "warn", "fail"]
    found: str
    wanted: str = ""


def judged(
    rates: Mapping[str, float],
    wrong: Sequence[str],
    baseline: Mapping[str, float],
    published: Mapping[str, float],
    *,
    on_host: bool,
) -> list[Measured]:
    """`rates`, `baseline`, `published`: by measure, bytes/s, of products FLOP/s. `wrong`: what it did wrong."""
    share = OF_BASELINE_ON_HOST if on_host else OF_BASELINE
    found = [Measured("results", "fail", text, "right") for text in wrong] or [Measured("results", "ok", "right")]
    for measure, rate in rates.items():
        least = {
            "its own baseline": baseline.get(measure, 0.0) * share,
            "what is published for it": published.get(measure, 0.0),
        }
        wanted = [
            f"{spoken(measure, bound)} ({f'{share:.0%} of ' if of == 'its own baseline' else ''}{of})"
            for of, bound in least.items()
            if bound
        ]
        slow = any(rate < bound for bound in least.values())
        state: Literal["ok", "warn", "fail"] = "ok" if not slow else "warn" if on_host else "fail"
        found.append(Measured(measure, state, spoken(measure, rate), ", ".join(wanted) or "no baseline yet"))
    return found


def fault_of(found: Sequence[Measured]) -> Fault | None:
    """Why the device must not be used; None if it may be."""
    failing = [one for one in found if one.state == "fail"]
    wrong = [one for one in failing if one.measure == "results"]
    if wrong:
        return Fault(f"does not compute right: {'; '.join(one.found for one in wrong)}", may_pass=False)
    if failing:
        told = "; ".join(f"{one.measure}: {one.found}, wanted {one.wanted}" for one in failing)
        return Fault(f"is slow by a deep check ({told})", may_pass=True)
    return None


def state_of(found: Sequence[Measured]) -> Literal["ok", "warn", "fail"]:
    states = {one.state for one in found}
    return "fail" if "fail" in states else "warn" if "warn" in states else "ok"


def spoken(measure: str, rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s" if measure == "products" else f"{rate / 1e9:.3g} GB/s"
