"""Settings of the controller; `appliance.config` composes them into the box's one TOML file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Seconds = Annotated[float, Field(gt=0)]
MIB, GIB = 2**20, 2**30


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class OwnerBounds(Section):
    """Limits on what all keys of one owner may store or run at once; admins have no limits, and a key may override
    limits (`appliance key limit --bound`)."""

    unfinished: int = Field(200, ge=0)
    """Jobs, batches, runs of evaluations, responses in background and uploads that have not ended."""
    bytes: int = Field(1024 * GIB, ge=0)
    """Files, versions of fine-tuned models, evaluations and their runs; an upload in progress counts twice what it
    announced. Copies of files that jobs keep until they end do not count."""
    responses: int = Field(50_000, ge=0)
    """Stored responses and chat completions; beyond it, the owner's oldest are deleted."""
    responses_bytes: int = Field(1024 * MIB, ge=0)
    """All stored responses and chat completions of the owner; beyond it, the oldest are deleted."""


class RetentionSettings(Section):
    """Days after which housekeeping deletes data; None: never. Where None is not allowed, set a large number. Stored
    responses and chat completions have `responses_kept_days`."""

    files_days: float | None = Field(None, gt=0)
    """Files of every purpose, except those that an unfinished job or batch reads; a file may have an earlier expiry of
    its own."""
    job_data_days: float | None = Field(30.0, gt=0)
    """The folders of ended jobs: events, TensorBoard files. The copy of the training data is deleted at once."""
    records_days: float | None = Field(400.0, gt=0)
    """What has ended: batches, runs of evaluations, jobs with their events and steps, hand-overs, imports and other
    operations. A job stays as long as a model that it made; files are files."""
    usage_days: float | None = Field(400.0, gt=0)
    """Tokens and energy by the hour, and devices held by jobs."""
    audit_days: float | None = Field(None, gt=0)
    """Rows of the audit log."""


Scope = Literal["inference", "fine_tuning", "read", "metrics", "admin"]


def _public(url: str) -> str:
    if url and not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} given, expected a URL that begins with https:// or http://")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


PublicUrl = Annotated[str, AfterValidator(_public)]
"""The URL of the box as browsers see it, without a slash at its end: paths are put behind it."""


def is_secure(url: str) -> bool:
    """Return whether nobody can read data on the way to this URL: it has TLS or is on this machine."""
    return url.startswith(("https://", "http://127.0.0.1", "http://localhost"))


class OidcSettings(Section):
    """Logins of the web page by an OpenID provider (docs/ui.md), which must allow the redirect URL `public_url` of
    `[box]` plus `/ui`. Without `issuer` there are no such logins."""

    issuer: str = ""
    """As the provider writes it, such as `https://login.example.org/realms/us`."""
    client_id: str = ""
    client_secret_path: str | None = None
    """A file with the secret, for a provider that gives this box one."""
    name: str = "single sign-on"
    """What the page calls it."""
    scopes: list[str] = ["openid", "profile", "email"]
    """What the provider is asked for."""
    name_claim: str = "preferred_username"
    """A person's name; without it the email, and without that the subject."""
    groups_claim: str = "groups"
    groups: dict[str, list[Scope]] = {}
    """What the members of each group may do here: `{ml-team = ["inference", "fine_tuning"]}`. Others may do nothing."""
    ca_path: str | None = None
    """The authority that signed the provider's certificate, unless this machine knows it."""

    @model_validator(mode="after")
    def _whole(self) -> OidcSettings:
        if not self.issuer:
            return self
        if not is_secure(self.issuer):
            raise ValueError(f"issuer: {self.issuer!r} given, expected a URL that begins with https://")
        if not self.client_id or not self.groups:
            raise ValueError("client_id and groups belong to an issuer")
        return self


class ControllerConfig(Section):
    """Every limit and wait of the controller, with its unit in the name."""

    organization: str = Field("local", pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")
    """Part of the names of fine-tuned models: ft:<base>:<organization>:<suffix>:<8 characters>."""

    # --- requests
    json_body_bytes: int = Field(8 * MIB, ge=1024)
    """A line of a batch; and the turns of a conversation together."""
    upload_bytes: int = Field(512 * MIB, ge=1024)
    upload_part_bytes: int = Field(64 * MIB, ge=1024)
    """One part of an upload in parts."""
    upload_total_bytes: int = Field(8192 * MIB, ge=1024)
    """A file that is uploaded in parts."""
    upload_open_s: Seconds = 3600.0
    """An upload in parts that is not completed within this time is deleted."""
    bounds: OwnerBounds = Field(default_factory=OwnerBounds)
    retention: RetentionSettings = Field(default_factory=RetentionSettings)
    oidc: OidcSettings = Field(default_factory=OidcSettings)
    disk_floor_bytes: int | None = Field(None, ge=0)
    """Free bytes on the data directory's volume below which nothing more is stored; unset: 2 % of it, at least 2 and at
    most 20 GiB, and never more than a tenth."""

    # --- batches
    batch_max_lines: int = Field(50_000, ge=1)
    """Requests in the input file of a batch."""

    # --- responses
    responses_kept_days: float = Field(30.0, ge=0)
    """Answers of /v1/responses, and chat completions with `store`, are kept for this long; 0: none is stored."""

    # --- bus
    gateway_gone_after_s: Seconds = 5.0
    """The gateway may connect again, or after a start of the controller for the first time, this long; afterwards its
    requests count as ended."""
