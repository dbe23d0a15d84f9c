"""Routing tables in one go, for tests that need no turns of the loop in between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.gateway.routing.table import Table, parsing


def parse_table(data: Mapping[str, Any], *, default_hold_s: float) -> Table:
    """Raises TableInvalid."""
    return next(filter(None, parsing(data, default_hold_s=default_hold_s)))
