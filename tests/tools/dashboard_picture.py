"""Draws the Grafana dashboard of images/monitoring from the series of a Prometheus, panel by panel in its grid.

Grafana itself is in no package registry, so this asks as Grafana does (`query_range`, its variables filled in) and
draws lines and numbers; units and colours are rough.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests.tools.monitored import MONITORING

Points = list[tuple[float, float]]
RATE_INTERVAL, STEP_S = "15s", 1.0
_CELL = 0.6  # inches for a column of the grid, and 0.3 for a row
_SCALED = {"bytes": (2**30, "GiB"), "hertz": (1e9, "GHz"), "percentunit": (0.01, "%")}


def panels() -> list[dict[str, Any]]:
    return [one for one in json.loads((MONITORING / "dashboard.json").read_text())["panels"]]


def series_of(address: str, panel: dict[str, Any], since_s: float, until_s: float) -> Iterator[tuple[str, Points]]:
    """The legend and the points (Unix time, value) of each series of a panel. address: of Prometheus' API."""
    for target in panel.get("targets", ()):
        expression = target["expr"].replace("$__rate_interval", RATE_INTERVAL).replace("$model", ".*")
        asked = {"query": expression, "start": since_s, "end": until_s, "step": STEP_S}
        answer = httpx.get(f"{address}/query_range", params=asked, timeout=60).json()
        assert answer["status"] == "success", f"{panel['title']}: {answer}"
        for one in answer["data"]["result"]:
            legend = re.sub(r"{{(\w+)}}", lambda word, of=one["metric"]: of.get(word[1], ""), target["legendFormat"])
            points = [(float(at), float(value)) for at, value in one["values"]]
            yield legend, [(at, value) for at, value in points if value == value]


def draw(address: str, since_s: float, until_s: float, picture: Path) -> list[str]:
    """Writes the PNG; returns the titles of the panels without a point."""
    shown = panels()
    rows = max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in shown)
    figure = Figure(figsize=(24 * _CELL, rows * _CELL / 2), dpi=70)
    FigureCanvasAgg(figure)
    empty = []
    for panel in shown:
        place = panel["gridPos"]
        left, bottom = place["x"] / 24, 1 - (place["y"] + place["h"]) / rows
        if panel["type"] == "row":
            figure.text(left + 0.01, bottom + 0.002, panel["title"], fontsize=13, weight="bold")
            continue
        found = [(legend, points) for legend, points in series_of(address, panel, since_s, until_s) if points]
        if not found:
            empty.append(panel["title"])
        axes = figure.add_axes((left + 0.035, bottom + 1.6 / rows, place["w"] / 24 - 0.05, (place["h"] - 3.2) / rows))
        axes.set_title(panel["title"], fontsize=9, loc="left")
        scale, unit = _SCALED.get(panel["fieldConfig"]["defaults"]["unit"], (1, ""))
        if panel["type"] == "stat":
            axes.axis("off")
            told = ", ".join(legend or f"{points[-1][1] / scale:.4g}" for legend, points in found) or "no data"
            axes.text(0.02, 0.4, told, fontsize=16)
            continue
        for legend, points in found:
            at, values = zip(*points, strict=True)
            axes.plot([one - since_s for one in at], [one / scale for one in values], label=legend[:48], linewidth=1)
        axes.tick_params(labelsize=7)
        axes.set_ylabel(unit, fontsize=7)
        if found:
            axes.legend(fontsize=5, loc="upper left", framealpha=0.5)
        else:
            axes.text(0.4, 0.5, "no data", transform=axes.transAxes, color="grey")
    figure.savefig(picture)
    return empty
