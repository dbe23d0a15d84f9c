"""Typed settings of the gateway process; the parent process resolves them, this module validates them once."""

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
# An origin in the form that browsers send: lower case, without a path.
Origin = Annotated[str, Meta(pattern=r"^([a-z][a-z0-9+.-]*://[a-z0-9._\-\[\]:]+|null|\*)$")]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the work that one client can cause, in bytes and seconds; docs/ prints the fields' docstrings."""

    max_connections: Count = 8192
    head_bytes: Count = 32 * 1024
    inference_body_bytes: Count = 8 * MIB
    control_body_bytes: Count = 8 * MIB
    upload_body_bytes: Count = 512 * MIB
    login_body_bytes: Count = 16 * 1024
    buffered_body_bytes: Count = 256 * MIB
    """All inference bodies in memory, held ones included."""
    owner_body_bytes: Count = 96 * MIB
    """Inference bodies in memory for all keys of one owner."""
    owner_requests: Count = 1536
    """Concurrent requests of all keys of one owner, waiting ones included."""
    buffered_response_bytes: Count = 256 * 1024
    """Largest non-streamed answer that is buffered until complete, so that another engine can replace a failed one."""
    stored_response_bytes: Count = 4 * MIB
    """Largest stored response or chat completion; a larger one is relayed unchanged and not stored."""
    response_copies_bytes: Count = 64 * MIB
    """Copies of answers that wait to be stored while the controller is unreachable."""
    json_depth: Count = 128
    sequences: Count = 256
    replica_inflight: Count = 1024
    head_timeout_s: Seconds = 15.0
    keepalive_s: Seconds = 75.0
    body_grace_s: Seconds = 30.0
    """Longest pause while a request body arrives."""
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
    """Resolved settings of the gateway process.

    private_socket: Unix socket for requests of the box itself, which name a key by its id. controller_socket: the
    controller's socket for gateways. token_path: file with the token that authenticates the gateway to it."""

    controller_socket: str
    bus_socket: str
    private_socket: str | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    token_path: str | None = None
    log_path: str | None = None
    access_log: bool = True
    otlp_endpoint: Annotated[str, Meta(pattern="^https?://")] | None = None
    # Origins of pages whose scripts may read answers, such as "https://chat.example.org"; "*" allows any page.
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
        """Validate the settings. Raises ConfigInvalid with the key and the expected value."""
        try:
            config = msgspec.convert(data, cls)
        except msgspec.ValidationError as error:  # its text is like "Expected … - at `$.limits.n`"
            expected, _, path = str(error).removesuffix("`").partition(" - at `$.")
            value: Any = data
            for part in re.findall(r"\w+", path):
                value = value[int(part) if part.isdigit() else part]
            raise ConfigInvalid(f"{path}: {value!r} given, e{expected[1:]}" if path else str(error)) from error
        if (config.tls_cert_path is None) != (config.tls_key_path is None):
            raise ConfigInvalid("tls_cert_path and tls_key_path: only one is set, expected both or neither")
        return config
