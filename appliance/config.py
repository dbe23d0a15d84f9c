"""The box's configuration: one TOML file, typed, composed of the settings that each package keeps beside its code.

This is the only file that reads the environment. Order of precedence: command line, `APPLIANCE_*` variables, the TOML
file, defaults. An unknown key is an error that names it and its file.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from appliance.controller.config import ControllerConfig
from appliance.gateway.config import HoldLimits, Limits
from scheduler.config import SchedulerConfig
from serve.config import EngineConfig
from weights.config import WeightsConfig

DEFAULT_DATA_DIR = Path("~/.local/share/appliance")


class ConfigError(ValueError):
    """The configuration cannot be used; the message names file and key, what was given and what is expected."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BoxSettings(_Section):
    """The box itself."""

    data_dir: str = Field(str(DEFAULT_DATA_DIR), description="everything that survives a restart lies here")
    host: str = Field("127.0.0.1", description="address the endpoint listens on; other than loopback needs a key")
    port: int = Field(8000, ge=0, le=65535)
    devices: Literal["auto"] | int = Field(
        "auto",
        description="'auto': every NVIDIA GPU, else 8 logical CPU devices; a number: so many logical CPU devices",
    )
    serving_floor: int = Field(0, ge=0, description="devices that serving keeps in every mode")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    hub_offline: bool = Field(True, description="refuse downloads from a model hub")
    hub_endpoint: str = Field("https://huggingface.co", description="hub to download from when hub_offline is false")


class GatewaySettings(_Section):
    """The endpoint's bounds, see appliance.gateway.config."""

    workers: int = Field(1, ge=1, description="gateway processes sharing the port")
    access_log: bool = True
    tls_cert_path: str | None = None
    tls_key_path: str | None = None
    shutdown_s: float = Field(30.0, gt=0)
    limits: Limits = Field(default_factory=Limits)
    holds: HoldLimits = Field(default_factory=HoldLimits)


class BoxConfig(_Section):
    """All sections of `appliance.toml`."""

    box: BoxSettings = Field(default_factory=BoxSettings)
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
    controller: ControllerConfig = Field(default_factory=ControllerConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    serve: EngineConfig = Field(default_factory=EngineConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)


def load_config(path: Path | None, overrides: dict[str, Any] | None = None) -> BoxConfig:
    """The configuration of `path` (None: `appliance.toml` in the data directory, if there is one).

    `overrides` are [box] settings from the command line; those that are None are left out. Raises ConfigError.
    """
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    box = {**_environment(), **given}
    if path is None:
        beside = Path(box.get("data_dir", DEFAULT_DATA_DIR)).expanduser() / "appliance.toml"
        path = beside if beside.exists() else None
    table: dict[str, Any] = {}
    if path is not None:
        try:
            table = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not TOML: {error}") from error
    table["box"] = {**table.get("box", {}), **box}
    return _checked(table, str(path) if path else "the command line or environment")


def load_resolved(text: str) -> BoxConfig:
    """A configuration that another process of the box resolved before. Raises ConfigError."""
    return _checked(json.loads(text), "--config-json")


def _checked(table: dict[str, Any], source: str) -> BoxConfig:
    try:
        config = BoxConfig.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            known = ", ".join(sorted(_known_keys(first["loc"][:-1])))
            raise ConfigError(f"{source}: unknown key {key!r}; known there: {known}") from error
        raise ConfigError(f"{source}: {key}: {first['input']!r} given, {first['msg']}") from error
    data_dir = str(Path(config.box.data_dir).expanduser().resolve())
    return config.model_copy(update={"box": config.box.model_copy(update={"data_dir": data_dir})})


def _known_keys(location: tuple[Any, ...]) -> set[str]:
    kind: Any = BoxConfig
    for part in location:
        fields = getattr(kind, "model_fields", None)
        kind = fields[part].annotation if fields and part in fields else kind
    if hasattr(kind, "model_fields"):
        return set(kind.model_fields)
    return set(getattr(kind, "__dataclass_fields__", ()))


def _environment() -> dict[str, Any]:
    names = {
        "APPLIANCE_DATA_DIR": "data_dir", "APPLIANCE_HOST": "host", "APPLIANCE_PORT": "port",
        "APPLIANCE_DEVICES": "devices",
    }  # fmt: skip
    found: dict[str, Any] = {key: os.environ[name] for name, key in names.items() if os.environ.get(name)}
    for key in ("port", "devices"):
        if str(found.get(key, "")).isdigit():
            found[key] = int(found[key])
    return found


def client_environment() -> tuple[str | None, str | None]:
    """(APPLIANCE_URL, APPLIANCE_API_KEY), as the commands find a box that runs elsewhere."""
    return os.environ.get("APPLIANCE_URL"), os.environ.get("APPLIANCE_API_KEY")
