"""The picture of a simulated day: load, devices by holder, time to first token. The only file here with matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display anywhere this runs

from matplotlib import pyplot  # noqa: E402  (the backend must be chosen before)

from scheduler.errors import TraceError  # noqa: E402
from scheduler.simulate import Figures, Setup  # noqa: E402


def plot(setup: Setup, figures: Figures, title: str, path: str | Path) -> None:
    """Draw to `path`, PNG or SVG by its ending. Raises TraceError for another ending or an unwritable path."""
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise TraceError(path, None, f"ending {path.suffix!r} given, .png or .svg expected")
    unit_s, unit = (3600.0, "hours") if setup.requests.horizon_s > 7200 else (60.0, "minutes")
    at = [s.at_s / unit_s for s in figures.samples]
    figure, (load, devices, latency) = pyplot.subplots(3, 1, figsize=(10, 7.5), sharex=True, layout="constrained")
    load.plot(at, [s.inflight for s in figures.samples], label="in flight", linewidth=1)
    load.plot(at, [s.held for s in figures.samples], label="held", linewidth=1)
    load.set_ylabel("requests")
    load.legend(loc="upper right")
    load.set_title(title)
    devices.stackplot(
        at,
        [s.serving_devices for s in figures.samples],
        [s.training_devices for s in figures.samples],
        labels=["serving", "training"],
        step="post",
    )
    devices.set_ylim(0, setup.devices)
    devices.set_ylabel("devices")
    devices.legend(loc="upper right")
    latency.scatter([t / unit_s for t, _ in figures.first_tokens], [s for _, s in figures.first_tokens], s=2)
    latency.axhline(setup.slo_ttft_s, linestyle="--", linewidth=1, color="grey", label="target")
    latency.set_yscale("log")
    latency.set_ylabel("time to first token, s")
    latency.set_xlabel(unit)
    latency.legend(loc="upper right")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise TraceError(path, None, f"cannot be written ({error.strerror})") from error
    finally:
        pyplot.close(figure)
