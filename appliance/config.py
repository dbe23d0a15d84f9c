"""The box's configuration: one TOML file, composed of the settings that the packages declare.

Only this file reads environment variables as settings. Order of precedence: command line, `APPLIANCE_*` variables, the
TOML file, defaults. A variable is called APPLIANCE_<KEY> for keys of [box] and APPLIANCE_<SECTION>__<KEY> for others.
An error names the source and the key.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError, model_validator

from appliance import DEFAULT_DATA_DIR, DEFAULT_PORT
from appliance.controller.interfaces.config import ControllerConfig, PublicUrl, Section, is_secure
from appliance.gateway.core.config import GatewayConfig, HoldLimits, Limits
from appliance.gateway.core.errors import ConfigInvalid
from scheduler.core.config import SchedulerConfig
from serve.core.config import EngineConfig
from weights.format.config import URL, Location, WeightsConfig

FILE_NAME = "appliance.toml"
_PREFIX = "APPLIANCE_"
# Suffixes of `APPLIANCE_*` variables other than settings: these locate a box for commands, or mark its processes.
_NO_SETTINGS = ("URL", "API_KEY", "CONFIG", "BOX", "BUILD")
RAY_WORKER_PORTS = range(10002, 20000)  # defaults of `ray start` (--min-worker-port, --max-worker-port)


# Credentials in an address like `https://USER:PASSWORD@host`, even if the scheme is mistyped or missing.
_CREDENTIALS = re.compile(r"(?<=//)[^\s'\"@]*(?:@[^\s'\"@/]*)*@|[^\s'\"@/:]+:[^\s'\"@/]*@")


class ConfigError(ValueError):
    """The configuration is invalid; the message has the source, the key, its value and the expected value. Text that
    looks like credentials is masked, because a journal may record the message."""

    def __init__(self, message: str):
        super().__init__(_CREDENTIALS.sub("***@", message))


class BoxSettings(Section):
    """Settings of the box itself."""

    data_dir: str = Field(DEFAULT_DATA_DIR, min_length=1, description="directory for all data that survives a restart")
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address of the endpoint; an address other than loopback opens only once a key exists",
    )
    port: int = Field(DEFAULT_PORT, ge=0, le=65535, description="TCP port of the endpoint")
    public_url: PublicUrl = Field(
        "",
        description="URL of the box for browsers, such as `https://box.example.org`; links to its page begin "
        "with it, and logins return to `PUBLIC_URL/ui`; unset: host and port",
    )
    devices: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto",
        description="'auto': every GPU, else 8 logical CPU devices; a number: this many logical CPU devices",
    )
    numa_bind: bool = Field(
        True,
        description="bind engines and ranks to the processors near their GPU on a machine with several NUMA nodes",
    )
    node_address: str | None = Field(
        None, description="address of this machine for the box's other nodes; unset: no other node can join"
    )
    node_port: int = Field(
        6380,
        ge=1,
        le=65535,
        description="TCP port on node_address at which other nodes join",
    )
    start_timeout_s: float = Field(
        180.0, ge=30, description="time limit for each start of Ray, of the controller, of the gateway and of a node"
    )
    memory_reserve_bytes: int | None = Field(
        None,
        ge=0,
        description="host memory to keep available for other programs; if less is available, the box frees memory, "
        "that of serving last; unset: 1/25 of the memory, at least 0.5 GiB, at most 8 GiB",
    )
    serving_floor: int = Field(0, ge=0, description="number of devices that serving keeps in every mode")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="log level of the controller")
    hub_offline: bool = Field(True, description="refuse downloads from a model hub")
    hub_endpoint: str = Field(
        "https://huggingface.co",
        pattern=URL,
        description="hub for downloads when hub_offline is false; overrides `HF_ENDPOINT`",
    )

    @model_validator(mode="after")
    def _free_node_port(self) -> BoxSettings:
        if self.node_address is not None and (self.node_port in RAY_WORKER_PORTS or self.node_port == self.port):
            raise ValueError(
                f"node_port is {self.node_port}; expected a port other than the endpoint's, and none of "
                f"{RAY_WORKER_PORTS[0]} to {RAY_WORKER_PORTS[-1]}, which Ray uses for its workers"
            )
        return self


class GatewaySettings(Section):
    """Settings of the endpoint and its limits."""

    access_log: bool = Field(True, description="write one line for each request to logs/access.log")
    tls_cert_path: str | None = Field(None, description="PEM certificate chain; enables TLS together with tls_key_path")
    tls_key_path: str | None = Field(None, description="PEM private key, readable only by the box")
    cors_origins: list[str] = Field(
        [],
        description="web pages whose scripts may call the box from a browser, such as `https://chat.example.org`; "
        "`*`: any page; each still needs a key",
    )
    shutdown_s: float = Field(30.0, gt=0, description="time limit for running requests when the box stops")
    prefix_cache_shared: bool = Field(
        False,
        description="share prefix cache entries between owners: this is faster if many requests "
        "share long prompts, but `cached_tokens` and response times then reveal prompts of other owners",
    )
    limits: Limits = Field(default_factory=Limits, description="limits on one client")
    holds: HoldLimits = Field(default_factory=HoldLimits, description="limits on requests that wait for a replica")


class ObservabilitySettings(Section):
    """Export of traces, in addition to logs and metrics."""

    otlp_endpoint: str | None = Field(
        None,
        pattern=URL,
        description="base URL of an OTLP/HTTP collector (`/v1/traces` is added) that gets a trace of every inference "
        "request; unset: no traces",
    )


class BackupSettings(Location, Section):
    """Where `appliance backup make` puts backups."""

    keep: int = Field(14, ge=1, description="number of newest backups to keep; older backups are deleted")


class PowerSettings(Section):
    """Power limits for the GPUs of the box's own machine (docs/operations.md, Power and energy)."""

    limits_w: dict[Literal["serve", "train", "split", "auto"], Annotated[float, Field(gt=0)]] = Field(
        {},
        description="power limit of each device in watts, by mode; a mode without an entry uses the device's own limit",
    )


class AlertSettings(Section):
    """Receivers of alerts about the box's problems (docs/operations.md, Alerts). Without a receiver nothing is sent."""

    webhook: str | None = Field(None, pattern=URL, description="URL to which each message is posted as JSON")
    webhook_format: Literal["json", "slack", "wecom", "feishu"] = Field(
        "json",
        description="'json': box, event, id, text and remedy; others: that chat service's form ('slack': Mattermost "
        "too, 'wecom': DingTalk too)",
    )
    email: list[str] = Field([], description="addresses to which each message is mailed")
    email_from: str = Field("appliance@localhost", description="sender's address of the mails")
    smtp_host: str = Field("localhost", description="mail server")
    smtp_port: int = Field(25, ge=1, le=65535, description="mail server's port: 25, 587 with starttls, 465 with tls")
    smtp_security: Literal["none", "starttls", "tls"] = Field("none", description="encryption to the mail server")
    smtp_user: str | None = Field(None, description="user name at the mail server; unset: no login")
    smtp_password_path: str | None = Field(None, description="file with the user's password, readable only by the box")
    repeat_s: float = Field(86_400.0, ge=3600, description="seconds between reminders of a persisting problem")

    @property
    def is_on(self) -> bool:
        return self.webhook is not None or bool(self.email)


class TrackingSettings(Section):
    """Experiment trackers that get the metrics of jobs (docs/tracking.md). By default nothing leaves the box."""

    mlflow_uri: str | None = Field(
        None, pattern=URL, description="MLflow tracking server; every job becomes a run there"
    )
    mlflow_experiment: str = Field("appliance", min_length=1, max_length=256, description="experiment of the runs")
    wandb_mode: Literal["offline", "online"] | None = Field(
        None,
        description="W&B runs of jobs with `integrations`: 'offline': a run in wandb_dir, which `wandb sync` "
        "sends later; 'online': a run at wandb_url",
    )
    wandb_dir: str | None = Field(None, description="folder of W&B's files; unset: `tracking` in the data directory")
    wandb_url: str | None = Field(None, pattern=URL, description="your own W&B server; unset: https://api.wandb.ai")
    credentials_file: str | None = Field(
        None,
        description="file readable only by the box's user, with lines such as `WANDB_API_KEY=...` and "
        "`MLFLOW_TRACKING_TOKEN=...`",
    )
    python: str | None = Field(
        None, description="Python interpreter with mlflow-skinny and wandb; unset: the box's own"
    )

    @property
    def trackers(self) -> tuple[Literal["mlflow", "wandb"], ...]:
        """Return the names of the enabled trackers."""
        return (("mlflow",) if self.mlflow_uri else ()) + (("wandb",) if self.wandb_mode else ())


class BoxConfig(Section):
    """All sections of `appliance.toml`."""

    box: BoxSettings = Field(default_factory=BoxSettings)
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
    observability: ObservabilitySettings = Field(default_factory=ObservabilitySettings)
    controller: ControllerConfig = Field(default_factory=ControllerConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    serve: EngineConfig = Field(default_factory=EngineConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    backup: BackupSettings = Field(default_factory=BackupSettings)
    tracking: TrackingSettings = Field(default_factory=TrackingSettings)
    power: PowerSettings = Field(default_factory=PowerSettings)
    alerts: AlertSettings = Field(default_factory=AlertSettings)

    @model_validator(mode="after")
    def _logins_come_back(self) -> BoxConfig:
        if self.controller.oidc.issuer and not is_secure(self.box.public_url):
            raise ValueError(
                f"box.public_url is {self.box.public_url!r}, to which logins of [controller.oidc] return; expected "
                "a URL that begins with https://"
            )
        return self

    @property
    def public_url(self) -> str:
        """Return the URL of the box for browsers."""
        return self.box.public_url or self.url

    @property
    def scheme(self) -> str:
        """Return the scheme of the endpoint's URLs; a client that calls an https endpoint by http leaks its key."""
        return "https" if self.gateway.tls_cert_path else "http"

    @property
    def url(self) -> str:
        """Return the URL of the endpoint's listening address."""
        return f"{self.scheme}://{self.box.host}:{self.box.port}"


Table = dict[str, Any]
Key = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Setting:
    """The value of a key, its source, and the key's name in that source."""

    value: Any
    source: str
    name: str


def load_config(
    path: Path | None, overrides: dict[str, Any] | None = None, environ: Mapping[str, str] = os.environ
) -> BoxConfig:
    """Load the configuration in `path` (None: `appliance.toml` in the data directory, if it exists).

    `overrides`: [box] settings from the command line; None values are ignored. Raises ConfigError.
    """
    typed = {key: value for key, value in (overrides or {}).items() if value is not None}
    above = _environment(environ) | _flat({"box": typed}, "the command line")
    beside = path is None
    if path is None:
        data_dir = above.get(("box", "data_dir"))
        path = Path(data_dir.value if data_dir else DEFAULT_DATA_DIR).expanduser() / FILE_NAME
    file: dict[Key, _Setting] = {}
    try:
        if not beside or path.exists():
            file = _flat(tomllib.loads(path.read_text()), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    if beside and ("box", "data_dir") in file:
        raise ConfigError(
            f"{path}: box.data_dir: this file is in the data directory and cannot set another one; use "
            "--data-dir or APPLIANCE_DATA_DIR, or give the file with --config"
        )
    hub = environ.get("HF_ENDPOINT", "").rstrip("/")
    below = {("box", "hub_endpoint"): _Setting(hub, "the environment", "HF_ENDPOINT")} if hub else {}
    return _checked(below | file | above, path.parent)


def load_resolved(path: Path) -> BoxConfig:
    """Load a configuration that another process of the box resolved and wrote to a file. Raises ConfigError."""
    return _checked(_flat(json.loads(path.read_text()), str(path)), Path.cwd())


def _flat(table: Table, source: str, at: Key = ()) -> dict[Key, _Setting]:
    """Flatten a TOML table to its settings. at: the table's own key. Raises ConfigError."""
    settings: dict[Key, _Setting] = {}
    for key, value in table.items():
        location = (*at, key)
        if value and isinstance(value, dict):
            settings |= _flat(value, source, location)
        elif not at and not isinstance(value, dict):
            raise ConfigError(f"{source}: {key} is {value!r}; expected a section, [{key}]")
        else:
            settings[location] = _Setting(value, source, ".".join(location))
    return settings


def _nested(settings: Mapping[Key, _Setting]) -> Table:
    table: Table = {}
    for (*sections, key), setting in settings.items():
        place = table
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{setting.source}: {setting.name}: {section} is {place!r}; expected a section")
        if setting.value != {}:
            place[key] = setting.value
        else:
            place.setdefault(key, {})
    return table


def _checked(settings: Mapping[Key, _Setting], folder: Path) -> BoxConfig:
    """Validate the settings. folder: directory in which relative paths of certificates start. Raises ConfigError."""
    try:
        config = BoxConfig.model_validate(_nested(settings))
    except ValidationError as error:
        raise ConfigError(_message(error.errors(), settings)) from error
    gateway = config.gateway.model_copy(
        update={
            key: str(folder / value)
            for key in ("tls_cert_path", "tls_key_path")
            if (value := getattr(config.gateway, key)) is not None
        }
    )
    try:
        # Run the gateway's own checks (range of each limit, both TLS files or none) before any process starts.
        GatewayConfig.from_mapping(
            gateway.model_dump()
            | {"host": config.box.host, "port": config.box.port, "controller_socket": "", "bus_socket": ""}
        )
    except ConfigInvalid as error:
        location = ("gateway", *str(error).partition(":")[0].split("."))
        source = settings[location].source if location in settings else "the configuration"
        raise ConfigError(f"{source}: gateway.{error}") from error
    data_dir = str(Path(config.box.data_dir).expanduser().resolve())
    return config.model_copy(update={"gateway": gateway, "box": config.box.model_copy(update={"data_dir": data_dir})})


def _message(errors: list[Any], settings: Mapping[Key, _Setting]) -> str:
    """Return a message about the first invalid key and its source."""

    def place(error: Any) -> Key:
        location = tuple(map(str, error["loc"]))
        # pydantic appends a union's branch to the key ("devices", "int"); no source has such a key.
        while not any(key[: len(location)] == location for key in settings):
            location = location[:-1]
        return location

    error, location = errors[0], place(errors[0])
    expected = " or ".join(dict.fromkeys(_expected(e) for e in errors if place(e) == location))
    section = ".".join(location)
    first = next(setting for key, setting in settings.items() if key[: len(location)] == location)
    name = first.name if location in settings else section
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = sorted(_known_keys(location[:-1]))
        close = difflib.get_close_matches(location[-1], known, n=1)
        guess = f"; did you mean {close[0]}?" if close else ""
        return f"{first.source}: unknown key {name}{guess} (known there: {', '.join(known)})"
    if isinstance(error["input"], dict):  # several settings conflict, maybe from several sources
        return f"the configuration: {f'[{section}]: ' if section else ''}{expected}"
    return f"{first.source}: {name} is {error['input']!r}: {expected}"


FORMS = {
    r"^[a-z0-9][a-z0-9-]{0,31}$": "1 to 32 characters of a-z, 0-9 and '-', not beginning with '-'",
    URL: "a URL that begins with http:// or https://, without credentials: put those into `credentials_file`, "
    "OTEL_EXPORTER_OTLP_HEADERS or HF_TOKEN",
}


def _expected(error: Any) -> str:
    form = FORMS.get(error["ctx"]["pattern"]) if error["type"] == "string_pattern_mismatch" else None
    return f"expected {form}" if form else str(error["msg"]).removeprefix("Value error, ")


def _known_keys(location: tuple[str, ...]) -> set[str]:
    """Return the keys of the section at `location`; (): the names of the sections."""
    kind: Any = BoxConfig
    for part in location:
        # All sections in a table of sections have the same keys, whatever the sections' names.
        kind = kind.model_fields[part].annotation if hasattr(kind, "model_fields") else get_args(kind)[-1]
    return set(getattr(kind, "model_fields", None) or getattr(kind, "__dataclass_fields__", ()))


def _environment(environ: Mapping[str, str]) -> dict[Key, _Setting]:
    """Return the settings among the environment variables, as text for pydantic. Empty variables count as unset."""
    settings: dict[Key, _Setting] = {}
    for variable, text in environ.items():
        name = variable.removeprefix(_PREFIX)
        if name == variable or name in _NO_SETTINGS or not text:
            continue
        location = tuple(part.lower() for part in name.split("__"))
        if len(location) == 1:
            # A name without a section may belong to other software (Kubernetes sets APPLIANCE_SERVICE_HOST for a
            # service called appliance); a name close to a known name is a typing error.
            if location[0] not in BoxSettings.model_fields:
                if close := difflib.get_close_matches(location[0], list(BoxSettings.model_fields), n=1, cutoff=0.75):
                    guess = f"{_PREFIX}{close[0].upper()}"
                    raise ConfigError(f"the environment: unknown variable {variable}; did you mean {guess}?")
                continue
            location = ("box", *location)
        settings[location] = _Setting(text, "the environment", variable)
    return settings


Schema = dict[str, Any]
_NAMES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true, false", "object": "table"}


def reference() -> str:
    """Return every key as Markdown, one table per section in `BoxConfig`'s order (`python -m appliance.config`)."""
    schema = BoxConfig.model_json_schema()
    return "\n\n".join(_table(title, kind) for title, kind in _sections(schema["$defs"], schema, "")) + "\n"


def _sections(known: Schema, kind: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    if path:
        yield path, kind
    for name, field in kind["properties"].items():
        if "$ref" in field:
            yield from _sections(known, known[field["$ref"].rpartition("/")[2]], f"{path}.{name}".lstrip("."))


def _table(title: str, kind: Schema) -> str:
    rows = []
    for name, field in kind["properties"].items():
        if "$ref" not in field:
            text = " ".join(field.get("description", "").split()).replace("|", "\\|")
            rows.append(f"| `{name}` | {_shape(field)} | {_literal(field['default'])} | {text} |")
    about = kind["description"].split("\n\n")[0].replace("\n", " ")
    head = [f"#### [{title}]", "", about, "", "| key | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *rows])


def _shape(field: Schema) -> str:
    if "anyOf" in field:
        return " or ".join(_shape(option) for option in field["anyOf"] if option.get("type") != "null")
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field["type"] == "array":
        return f"list of {_shape(field['items'])}s"
    return _NAMES[field["type"]]


def _literal(value: Any) -> str:
    if value is None:
        return "not set"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(reference(), end="")
