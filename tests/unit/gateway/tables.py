"""Routing tables for tests that need no bus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from appliance.gateway.core.table import Table, read_table


def parse_table(data: Mapping[str, Any]) -> Table:
    """Raises msgspec.ValidationError."""
    return read_table(orjson.dumps({"type": "table", **data}))
