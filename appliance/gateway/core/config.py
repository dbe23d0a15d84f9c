"""Defines the typed settings of the gateway process; its starter resolves them, this module checks them once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from appliance.gateway.core.errors import ConfigInvalid

MIB = 1 << 20
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
# As browsers send it: in small letters, without a path.
Origin = Annotated[str, Meta(pattern=r"^([a-z][a-z0-9+.-]*://[a-z0-9._\-\[\]:]+|null|\*)$")]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the work one client may cause. Sizes in bytes, times in seconds; the reference shows these texts."""

    max_connections: Count = 8192
    head_bytes: Count = 32 * 1024
    inference_body_bytes: Count = 8 * MIB
    control_body_bytes: Count = 8 * MIB
    upload_body_bytes: Count = 512 * MIB
    login_body_bytes: Count = 16 * 1024
    buffered_body_bytes: Count = 256 * MIB
    """All inference bodies in memory, held ones included."""
    owner_body_bytes: Count = 96 * MIB
    """Of those, the bodies of one owner's keys."""
    owner_requests: Count = 1536
    """Requests of one owner's keys at once, waiting ones included."""
    buffered_response_bytes: Count = 256 * 1024
    """Largest plain answer of an engine that is kept until it is whole, so that another engine can still give it."""
    stored_response_bytes: Count = 4 * MIB
    """Largest stored response or chat completion; a larger one is relayed unchanged and not stored."""
    response_copies_bytes: Count = 64 * MIB
    """Copies of stored answers that wait for an unreachable controller."""
    json_depth: Count = 128
    sequences: Count = 256
    replica_inflight: Count = 1024
    head_timeout_s: Seconds = 15.0
    keepalive_s: Seconds = 75.0
    body_grace_s: Seconds = 30.0
    """Longest pause of an arriving body."""
    write_stall_s: Seconds = 60.0
    upstream_silence_s: Seconds = 600.0
    controller_wait_s: Seconds = 5.0


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """Limits on requests held while no replica of their model is open."""

    requests: Count = 4096
    hold_s: Seconds = 600.0
    sse_grace_s: Seconds = 5.0
    """A stream held longer gets status 200 and comments, so that proxies keep it open."""
    sse_interval_s: Seconds = 15.0
    retry_after_s: Count = 5


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Everything the gateway process needs to know.

    private_socket: where it listens to the box itself, which names a key by its id. controller_socket: the controller's
    socket for gateways; token_path: the file with the token that proves to it that a gateway wrote a head."""

    controller_socket: str
    bus_socket: str
    private_socket: str | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    token_path: str | None = None
    log_path: str | None = None
    access_log: bool = True
    otlp_endpoint: Annotated[str, Meta(pattern="^https?://")] | None = None
    # Pages whose scripts may read answers: "https://chat.example.org"; "*": any. Empty: none.
    cors_origins: tuple[Origin, ...] = ()
    stores_responses: bool = True
    # False: prefix cache entries serve only requests of the owner that created them.
    prefix_cache_shared: bool = False
    tls_cert_path: str | None = None
    tls_key_path: str | None = None
    shutdown_s: Seconds = 30.0
    sweep_s: Seconds = 0.5
    report_s: Seconds = 0.25
    limits: Limits = field(default_factory=Limits)
    holds: HoldLimits = field(default_factory=HoldLimits)

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> GatewayConfig:
        """Raises ConfigInvalid naming the key and what is expected."""
        try:
            config = msgspec.convert(data, cls)
        except msgspec.ValidationError as error:  # "Expected … - at `$.limits.n`": the key and the value go in front
            expected, _, path = str(error).removesuffix("`").partition(" - at `$.")
            value: Any = data
            for part in re.findall(r"\w+", path):
                value = value[int(part) if part.isdigit() else part]
            raise ConfigInvalid(f"{path}: {value!r} given, e{expected[1:]}" if path else str(error)) from error
        if (config.tls_cert_path is None) != (config.tls_key_path is None):
            raise ConfigInvalid("tls_cert_path and tls_key_path: one given, expected both or neither")
        return config
