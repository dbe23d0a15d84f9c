"""Defines the typed settings of the gateway process; its starter resolves them, this module checks them once."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.gateway.core.errors import ConfigInvalid

MIB = 1 << 20
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._\-\[\]:]+\Z|null\Z")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the work one client may cause. Sizes in bytes, times in seconds."""

    max_connections: int = 8192
    head_bytes: int = 32 * 1024
    header_count: int = 100
    target_bytes: int = 8 * 1024
    pipelined_requests: int = 16
    inference_body_bytes: int = 8 * MIB
    control_body_bytes: int = 8 * MIB
    upload_body_bytes: int = 512 * MIB
    # All inference bodies in memory, held ones included: bounds the cost of many slow or held clients.
    buffered_body_bytes: int = 256 * MIB
    # The share of the bodies of one owner's keys. Then their concurrent requests, waiting ones included; their streams;
    # and their requests to routes that the controller answers (no limit for administrators).
    owner_body_bytes: int = 96 * MIB
    owner_requests: int = 1536
    owner_streams: int = 1024
    owner_control_requests_per_minute: int = 1200
    # The gateway buffers an engine's plain JSON answer up to this size, so that it can still retry elsewhere.
    buffered_response_bytes: int = 256 * 1024
    # Largest stored answer of /v1/responses, or chat completion; a larger one is relayed unchanged and not stored.
    stored_response_bytes: int = 4 * MIB
    # Copies of them that wait for an unreachable controller.
    response_copies_bytes: int = 64 * MIB
    # The part of that which the copies of one owner may take.
    owner_copies_bytes: int = 16 * MIB
    json_depth: int = 128
    # Messages of one conversation, and the same number of parts; items of /v1/responses.
    messages: int = 2048
    input_items: int = 1024
    n: int = 64
    sequences: int = 256
    max_tokens: int = 1 << 20
    top_logprobs: int = 20
    embedding_inputs: int = 2048
    replica_inflight: int = 1024
    head_timeout_s: float = 15.0
    keepalive_s: float = 75.0
    # A client must deliver this many bytes of body in every such window, or it is cut off (slow-loris).
    body_window_s: float = 30.0
    body_window_bytes: int = 16 * 1024
    # And on average this many per second over the whole body, after an initial period, so that every body ends.
    body_bytes_per_s: int = 32 * 1024
    body_grace_s: float = 60.0
    write_stall_s: float = 60.0
    # Over a whole answer a client may hold the gateway up for an initial period and for as long as this rate needs, so
    # that every download ends.
    answer_bytes_per_s: int = 8 * 1024
    answer_grace_s: float = 60.0
    upstream_silence_s: float = 600.0
    controller_wait_s: float = 5.0


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """Limits on requests held while no replica of their model is open."""

    requests: int = 4096
    requests_per_model: int = 2048
    body_bytes: int = 128 * MIB
    hold_s: float = 600.0
    # A streaming request held longer than this gets status 200 and comments, so that proxies keep it open.
    sse_grace_s: float = 5.0
    sse_interval_s: float = 15.0
    retry_after_s: int = 5


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Everything the gateway process needs to know.

    `name` identifies this gateway on the bus; worker i of several appends "-i". /health answers with `boot`, so that
    the starter can tell this gateway from another program on the same port. `controller_socket` is the controller's
    socket for gateways; the file `token_path` holds the token that proves to it that a gateway wrote a head.
    """

    controller_socket: str
    bus_socket: str
    host: str = "127.0.0.1"
    port: int = 8000
    name: str = "gateway"
    boot: str = ""
    token_path: str | None = None
    workers: int = 1
    log_path: str | None = None
    access_log: bool = True
    otlp_endpoint: str | None = None
    # Pages whose scripts may read answers: "https://chat.example.org"; "*": any. Empty: none.
    cors_origins: tuple[str, ...] = ()
    stores_responses: bool = True
    # False: prefix cache entries serve only requests of the owner that created them.
    prefix_cache_shared: bool = False
    tls_cert_path: str | None = None
    tls_key_path: str | None = None
    shutdown_s: float = 30.0
    sweep_s: float = 0.5
    report_s: float = 0.25
    limits: Limits = field(default_factory=Limits)
    holds: HoldLimits = field(default_factory=HoldLimits)

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> GatewayConfig:
        """Build from plain JSON data. Raises ConfigInvalid naming the key, what was given and what is expected."""
        config = _build(cls, data, "")
        if not 0 <= config.port <= 65535:
            raise ConfigInvalid(f"port: {config.port} given, expected 0..65535")
        if config.workers < 1:
            raise ConfigInvalid(f"workers: {config.workers} given, expected at least 1")
        if config.workers > 1 and config.port == 0:
            raise ConfigInvalid("port: 0 given with several workers, expected a fixed port they can share")
        if (config.tls_cert_path is None) != (config.tls_key_path is None):
            raise ConfigInvalid("tls_cert_path and tls_key_path: one given, expected both or neither")
        if config.otlp_endpoint is not None and not config.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigInvalid(f"otlp_endpoint: {config.otlp_endpoint!r} given, expected an http or https URL")
        for origin in config.cors_origins:
            if origin != "*" and not _ORIGIN.match(origin):
                raise ConfigInvalid(
                    f"cors_origins: {origin!r} given, expected an origin as browsers send it, such as "
                    "'https://chat.example.org' or 'http://localhost:3000', in small letters and without a path, or '*'"
                )
        for name in ("controller_socket", "bus_socket"):
            # sun_path holds 108 bytes with its terminating NUL.
            if len(os.fsencode(getattr(config, name))) > 107:
                raise ConfigInvalid(f"{name}: path longer than 107 bytes, use a shorter run directory")
        return config

    @property
    def is_loopback(self) -> bool:
        return self.host == "localhost" or (_is_address(self.host) and ipaddress.ip_address(self.host).is_loopback)


def load_config(path_or_json: str) -> GatewayConfig:
    """Read a config from a JSON object or from the path of a file with one. Raises ConfigInvalid."""
    text = path_or_json
    if not text.lstrip().startswith("{"):
        try:
            text = Path(path_or_json).read_text()
        except OSError as error:
            raise ConfigInvalid(f"--config-json: cannot read {path_or_json!r} ({error.strerror})") from error
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigInvalid(f"--config-json: not JSON ({error})") from error
    return GatewayConfig.from_mapping(data)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _build(cls: type, data: Any, prefix: str) -> Any:
    if not isinstance(data, Mapping):
        raise ConfigInvalid(f"{prefix or 'config'}: {type(data).__name__} given, expected an object")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if unknown := sorted(set(data) - set(fields)):
        raise ConfigInvalid(f"{prefix}{unknown[0]}: unknown key, expected one of {', '.join(sorted(fields))}")
    values: dict[str, Any] = {}
    for name, value in data.items():
        kind = str(fields[name].type)  # the text of the annotation: annotations are not evaluated in this module
        if name == "limits":
            values[name] = _build(Limits, value, "limits.")
        elif name == "holds":
            values[name] = _build(HoldLimits, value, "holds.")
        else:
            values[name] = _checked(prefix + name, kind, value)
    missing = [
        f.name
        for f in fields.values()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and f.name not in values
    ]
    if missing:
        raise ConfigInvalid(f"{prefix}{missing[0]}: missing, expected a {fields[missing[0]].type}")
    return cls(**values)


def _checked(name: str, kind: str, value: Any) -> Any:
    if value is None and kind.endswith("| None"):
        return None
    kind = kind.removesuffix("| None").strip()
    if kind == "tuple[str, ...]" and isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if kind == "float" and isinstance(value, int | float) and not isinstance(value, bool):
        if math.isfinite(value) and value >= 0:
            return float(value)
    raise ConfigInvalid(f"{name}: {value!r} given, expected a {kind}" + (" >= 0" if kind in ("int", "float") else ""))
