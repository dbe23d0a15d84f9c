"""What gateways and the simulator must judge alike about requests at engines. Pure."""

from __future__ import annotations

PENDING_TO_TOTAL = 16
"""A prompt token that stands before a first token weighs as much as this many tokens in all: those slow a step down."""
