"""Names of models: valid names, names of fine-tuned models, the version that a name means. And models visible to a key:
made by its owner or shared with the owner, limited to the key's list if it has one.

The gateways apply the same rule to the table (`gateway.table.Principal`): a request finds the same models in both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import StringConstraints

from appliance.controller.interfaces.errors import Forbidden, NotFound, shown
from appliance.controller.interfaces.principal import ADMIN, INFERENCE, Principal
from appliance.store import jobs, keys, models
from appliance.store.database import Database
from appliance.store.rows import JobRow, ModelRow, VersionRow, new_id
from weights.format.names import version_name

# Printable ASCII without blanks: names appear in header lines and paths. No leading dot or slash, no "@" (it
# separates a version).
_MODEL_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._:/-]{0,254}[A-Za-z0-9._:-])?\Z")
_STABLE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_NOT_IN_SUFFIX = re.compile(r"[^a-z0-9_.-]+|\.\.+")
STABLE_NAME_RULE = "1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit, without '..'"
MODEL_NAME_RULE = "letters, digits, '.', '_', ':', '-' and '/', at most 256, beginning with a letter or digit"


# An owner or a name of a key, for use in header lines, tables and lists. It is never models.EVERYBODY.
OwnerName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._ @-]{0,63}$")]
# A name that a client may call: of a model, a checkpoint or `MODEL@VERSION`. It appears in the gateways' table and in
# header lines, so all external input must match it.
CallableName = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,512}$")]


def is_model_name(name: str) -> bool:
    return bool(_MODEL_NAME.match(name)) and ".." not in name and "//" not in name


def suffix_in_name(suffix: str) -> str:
    """Return a job's suffix in OpenAI's form for a model's name: lower case, with "-" for invalid characters; "" if no
    valid character remains."""
    return _NOT_IN_SUFFIX.sub("-", suffix.lower()).strip("-._")


def is_stable_name(name: str) -> bool:
    """Return whether a job's owner may choose this name for its model. It has no ":" or "/", so it cannot equal a
    checkpoint's name, a name that the box makes for a fine-tuned model, or a hub's ORGANISATION/MODEL."""
    return bool(_STABLE_NAME.match(name)) and is_model_name(name)


def version_prefix(job: JobRow) -> str:
    """Return the prefix of the names of a job's versions; it differs by job, as jobs may share a stable name."""
    return f"{job.id.removeprefix('ftjob-')[:8]}-" if job.stable_name else ""


def checkpoint_name(job: JobRow, step: int) -> str:
    return f"{job.output_model}{models.CHECKPOINT_MARK}{version_prefix(job)}{version_name(step)}"


@dataclass(frozen=True, slots=True)
class Resolved:
    """The version that a public name means: a checkpoint, `MODEL@VERSION`, or the model's active version."""

    name: str
    model: ModelRow
    version: VersionRow

    @property
    def quantization(self) -> str | None:
        """The format of the version's quantised layers; None if it has none."""
        form: str | None = self.version.meta.get("quantization", self.model.info.get("quantization"))
        return form


def resolve(db: Database, name: str) -> Resolved | None:
    """Look up a public name. Returns None for an unknown name, and for a model without an active version."""
    model = models.find(db, name)
    if model is not None:
        version = models.active(db, model)
        return Resolved(name, model, version) if version else None
    version = models.find_checkpoint(db, name)
    if version is not None:
        model = models.find(db, version.model)
        return Resolved(name, model, version) if model else None
    model_name, at, version_name = name.rpartition(models.VERSION_MARK)
    if at:
        model, version = models.find(db, model_name), models.find_version(db, model_name, version_name)
        return Resolved(name, model, version) if model and version else None
    return None


def model_of(db: Database, name: str) -> str:
    """Return the model's part of a public name; the model need not exist."""
    if models.find(db, name) is not None:
        return name
    checkpoint = models.find_checkpoint(db, name)
    return checkpoint.model if checkpoint is not None else name.rpartition(models.VERSION_MARK)[0] or name


def made_by_jobs(db: Database, name: str) -> bool:
    """Return whether jobs made or will make the model with this name, to which imports may not add versions."""
    row = models.find(db, name)
    has_job = row is not None and row.job_id is not None
    return has_job or bool(jobs.list_unfinished(db, " AND output_model = ?", name))


def root_base(db: Database, model: ModelRow) -> str:
    """Return the first base of a chain of fine-tuned models: tuning `ft:starter:…` makes another `ft:starter:…`."""
    seen = {model.id}
    while model.base is not None and model.base not in seen:
        seen.add(model.base)
        below = models.find(db, model.base)
        if below is None:
            return model.base
        model = below
    return model.id


# --- models that a key may see and use


def unknown_model(name: str, param: str = "model") -> NotFound:
    message = f"The model {shown(name)} does not exist or you do not have access to it; `appliance model list` shows"
    return NotFound(f"{message} yours.", param, "model_not_found")


def stored_version(db: Database, model: str, version: str) -> VersionRow:
    """Return a model's version, without checking access. Raises NotFound."""
    if (row := models.find_version(db, model, version)) is not None:
        return row
    message = f"{model} has no version {shown(version)}; `appliance model show {model}` lists them."
    raise NotFound(message, "version", "version_not_found")


def known_model(db: Database, name: str) -> Resolved:
    """Return the version that a public name means, without checking access. Raises NotFound."""
    if (resolved := resolve(db, name)) is None:
        raise unknown_model(name)
    return resolved


def usable_model(db: Database, caller: Principal, name: str) -> Resolved:
    """Return the model if the caller's key may use it. Raises NotFound."""
    if not caller_may_use(db, caller, name):
        raise unknown_model(name)
    return known_model(db, name)


def stored_model(db: Database, name: str) -> ModelRow:
    """Return a model's row, without checking access. Raises NotFound."""
    if (row := models.find(db, name)) is None:
        raise unknown_model(name)
    return row


def caller_of(db: Database, key_id: str | None) -> Principal:
    """Return the principal for work that outlives its request: this key, or the box itself. It does not check whether
    the key is live."""
    if key_id is None:
        return Principal(None, frozenset({ADMIN}), new_id("req_"), "")
    row = keys.find(db, key_id)
    return Principal(key_id, frozenset(row.scopes if row else ()), new_id("req_"), keys.owner_of(db, key_id))


def may_use(db: Database, key_id: str | None, name: str) -> bool:
    """Return whether work of this key (None: the box itself) may use the model with this name."""
    return caller_may_use(db, caller_of(db, key_id), name)


def caller_may_use(db: Database, caller: Principal, name: str) -> bool:
    """Return whether the caller may use this name; access to a model includes its versions and checkpoints."""
    model = model_of(db, name)
    if not models.is_visible(db, model, caller.viewer) or models.find(db, model) is None:
        return False
    row = keys.find(db, caller.key_id) if caller.key_id is not None else None
    if row is None or row.models is None:
        return True
    # Every key's list includes the models and checkpoints that the owner's jobs made.
    names, owner = {name, name.partition("@")[0]}, keys.owner_of(db, row.id)
    return not names.isdisjoint(row.models) or any(jobs.has_made(db, owner, one) for one in names)


def check_may_ask(db: Database, caller: Principal, name: str, param: str = "model") -> None:
    """Check that the caller has the scope inference and may use the model. param: field of the request with the model's
    name. Raises Forbidden, NotFound."""
    if not caller.may(INFERENCE):
        raise Forbidden(INFERENCE)
    lacks_version = "@" in name and models.find(db, name) is None and resolve(db, name) is None
    if lacks_version or not caller_may_use(db, caller, name):
        raise unknown_model(name, param)


def base_of(db: Database, job: JobRow) -> Resolved | None:
    """Return the model that a job trains; None once it is deleted or the job's key may no longer use it.

    Call it at each stage of a job, which may wait for weeks between its creation and its run.
    """
    return resolve(db, job.model) if may_use(db, job.key_id, job.model) else None
