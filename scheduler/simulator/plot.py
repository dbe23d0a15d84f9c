"""Plots a simulated day: load, devices by holder, time to first token. The only file here that uses matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # there is never a display

from matplotlib import dates, pyplot  # noqa: E402  (the backend must be chosen before)
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from scheduler.core.errors import TraceError  # noqa: E402
from scheduler.simulator.simulate import Figures, Setup  # noqa: E402
from scheduler.simulator.trace import Requests  # noqa: E402


def plot(setup: Setup, figures: Figures, title: str, path: str | Path) -> None:
    """Draw to `path`, PNG or SVG by its suffix. Raises TraceError for another suffix or an unwritable path."""
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise TraceError(path, None, f"ending {path.suffix!r} given, .png or .svg expected")
    unit_s, unit, began = _axis(setup.requests)
    at = [began + s.at_s / unit_s for s in figures.samples]
    figure, (load, devices, latency) = pyplot.subplots(3, 1, figsize=(10, 7.5), sharex=True, layout="constrained")
    load.plot(at, [s.inflight for s in figures.samples], label="in flight", linewidth=1)
    load.plot(at, [s.held for s in figures.samples], label="held", linewidth=1)
    for axes in (load, devices, latency):
        axes.margins(x=0)
    load.set_ylabel("requests")
    load.yaxis.set_major_locator(MaxNLocator(integer=True))
    load.set_ylim(bottom=0)
    _legend(load)
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
    devices.yaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(devices)
    latency.scatter(
        [began + t / unit_s for t, _ in figures.first_tokens],
        [s for _, s in figures.first_tokens],
        s=2,
        label="requests",
    )
    latency.axhline(setup.slo_ttft_s, linestyle="--", linewidth=1, color="grey", label="target")
    latency.set_yscale("log")
    latency.set_ylabel("time to first token, s")
    latency.yaxis.set_major_formatter("{x:g}")
    latency.set_xlabel(unit)
    if began:
        latency.xaxis_date(tz="UTC")
        latency.xaxis.set_major_formatter(dates.ConciseDateFormatter(latency.xaxis.get_major_locator(), tz="UTC"))
    _legend(latency)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise TraceError(path, None, f"cannot be written ({error.strerror})") from error
    finally:
        pyplot.close(figure)


def _axis(requests: Requests) -> tuple[float, str, float]:
    """Seconds per unit of the time axis, the unit's name, and the trace's beginning on it: 0 if it has no date."""
    if requests.began_s is not None:
        return 86400.0, "time (UTC)", requests.began_s / 86400.0
    return (3600.0, "hours", 0.0) if requests.horizon_s > 7200 else (60.0, "minutes", 0.0)


def _legend(axes: Axes) -> None:
    """Place it beside the axes, where it hides nothing."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), markerscale=3)
