"""Import models into `<models>/<name>/<version>/`, each a checkpoint directory with a sealed manifest.

All functions block: call them in a worker thread. A version appears by one rename after all its bytes are checked and
on disk. The next import removes what a crash left in `.staging`. Version numbers are never reused, because engines,
other nodes and tiers identify a version by name and number alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from appliance.models import adapter, hub, trial
from appliance.models.checkpoint import Facts, choose_files, examine, regular
from appliance.models.errors import InvalidModelName, NotEnoughDisk, NotEnoughMemory, SourceNotFound
from appliance.models.put_right import check_numbers, put_right
from train.convert.gguf import is_gguf
from weights.checkpoint import generation
from weights.checkpoint.folder import CheckpointRefused, NotACheckpoint, read_json
from weights.format.layout import Layout
from weights.format.manifest import Manifest
from weights.format.names import Name, encode_name, replace_file, sync
from weights.tiers.copies import DirectoryCopies, seal_dir

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
MAX_NAME_CHARACTERS = 128
CONVERT_S = 86_400.0
KEPT_FREE_BYTES = 256 << 20  # bytes of disk space that imports leave to database, logs and jobs

Report = Callable[[float, float | None, str, str], None]
"""`report(done, total, unit, message)`; an exception from it cancels the import."""


def silent(*_: Any) -> None:
    """Ignore a progress report."""


@dataclass(frozen=True, kw_only=True)
class ModelVersion(Facts):
    """A version on disk. `bytes`: size of its tensors and described files."""

    name: str
    version: str
    path: Path
    bytes: int
    source: str


@dataclass(frozen=True)
class _Fetched:
    """A source's files in `folder`. name: the model's name. source: text for people. ours: the files may be moved."""

    folder: Path
    name: str
    source: str
    ours: bool


class ModelLibrary:
    """All models below `models_dir` (created 0700). Only one process may import at a time; all may read."""

    def __init__(self, models_dir: Path, *, hub_settings: hub.HubSettings | None = None):
        self._root = Path(models_dir)
        self._hub = hub_settings or hub.HubSettings()

    def import_model(
        self, source: str | Path, *, name: str | None = None, revision: str | None = None, report: Report = silent
    ) -> ModelVersion:
        """Import a new version of `name` (default: the name of the directory, file or repository).

        It imports safetensors, configuration, tokenizer and README.md, but no code, pickles or subdirectories. After an
        interrupted download a new call fetches only the missing files.

        Args:
            source: the directory or GGUF file of a checkpoint if it exists, else a hub repository.
            revision: a branch, tag or commit of the repository.

        Raises ModelError, CheckpointRefused, weights.format.errors.IntegrityError (a damaged weight file).
        """
        with self._fetched(str(source), name, revision, report) as fetched:
            if adapter.is_adapter(fetched.folder):
                raise NotACheckpoint(
                    "",
                    f"{source} is an adapter; expected a checkpoint with config.json and weights. Import an "
                    f"adapter together with its base (`appliance model import {source} --base NAME`)",
                )
            return self._take_in(fetched, report)

    def find_adapter(
        self, source: str, *, name: str | None = None, revision: str | None = None
    ) -> tuple[str, str, str | None] | None:
        """Return the name for the adapter `source`, a directory or a hub repository, its base ("": unknown) and its
        commit on the hub; None if `source` is not an adapter. This function fetches only a repository's listing and
        adapter_config.json. Raises CheckpointRefused, InvalidModelName, SourceNotFound, HubError."""
        if _is_path(source, revision):
            path = Path(source).expanduser().resolve()
            if not path.is_dir() or not adapter.is_adapter(path):
                return None
            return check_name(name if name is not None else _name_of(path.name)), adapter.read_base(path), None
        chosen_name, listing = self._listed(source, name, revision)
        if not listing.is_adapter:
            return None
        described = replace(listing, files=tuple(file for file in listing.files if file.name == adapter.CONFIG_FILE))
        return chosen_name, adapter.read_base(self._downloaded(described, silent)), listing.commit

    def import_adapter(
        self,
        source: str,
        *,
        name: str,
        base: str,
        base_version: str,
        base_path: Path,
        rank_limit: int,
        revision: str | None = None,
        report: Report = silent,
    ) -> ModelVersion:
        """Import the adapter `source` of peft, a directory or a hub repository at `revision`, as a version of `name`.
        It is served with version `base_version` of `base` in `base_path`. `rank_limit`: highest rank that engines take.

        It imports adapter_config.json, adapter_model.safetensors and README.md. Raises CheckpointRefused,
        weights.format.errors.IntegrityError, NotEnoughDisk, HubError.
        """
        with self._fetched(source, name, revision, report) as fetched:
            files = adapter.choose_files(fetched.folder)
            note = [] if fetched.ours else adapter.template_note(fetched.folder, base, base_path)
            with self._staged(files, fetched, report) as staging:
                layout = Layout.read(staging)
                below = Layout.read(base_path)
                rank = adapter.examine(staging, layout, base=base, base_layout=below, rank_limit=rank_limit)
                check_numbers(staging, layout)
                meta = {
                    "source": fetched.source,
                    "params": sum(placed.spec.numel for placed in layout),
                    "base": base,
                    "base_version": base_version,
                    "warnings": note,
                    "info": {"adapter": {"rank": rank, "trained_on": adapter.read_base(staging)}},
                }
                return self._publish(staging, "adapter", name, meta)

    @contextlib.contextmanager
    def _fetched(self, source: str, name: str | None, revision: str | None, report: Report) -> Iterator[_Fetched]:
        """Yield a source's files on this machine. If the block fails, a download stays, so that it can be resumed."""
        staging = self._root / ".staging"
        for entry in staging.iterdir() if staging.is_dir() else ():  # delete staging of dead processes, not downloads
            owner = re.search(r"(\d+)-[0-9a-f]{32}", entry.name)
            if owner is None or not Path(f"/proc/{owner[1]}").exists():
                shutil.rmtree(entry, ignore_errors=True)
        if not _is_path(source, revision):
            report(0, None, "", f"listing the files of {source} on the hub")
            chosen_name, listing = self._listed(source, name, revision)
            folder = self._downloaded(listing, report)
            yield _Fetched(folder, chosen_name, f"{listing.repository}@{listing.commit}", ours=True)
            shutil.rmtree(folder)
            return
        path = Path(source).expanduser()
        if (file := _gguf(path)) is not None:
            chosen_name = check_name(name if name is not None else _name_of(file.stem))
            self._require_space(file.stat().st_size)  # a lower bound: 4-bit weights grow to bfloat16
            with self._staging() as staging:
                _convert_gguf(file, staging / "made", report)
                _keep_sampling(file.parent, staging / "made" / generation.FILE)
                yield _Fetched(staging / "made", chosen_name, str(file), ours=True)
            return
        if not path.is_dir():
            fault = "is a file but not GGUF" if path.exists() else "does not exist"
            raise SourceNotFound(
                f"{path} {fault}; expected the directory of a checkpoint (config.json, *.safetensors) or a .gguf file"
            )
        path = path.resolve()
        chosen_name = check_name(name if name is not None else _name_of(path.name))
        yield _Fetched(path, chosen_name, str(path), ours=False)

    def _listed(self, source: str, name: str | None, revision: str | None) -> tuple[str, hub.Listing]:
        """Return a name for the hub's model, and the listing of its files."""
        hub.check_reference(source, revision)
        return check_name(name if name is not None else source), hub.list_files(source, revision, self._hub)

    def _downloaded(self, listing: hub.Listing, report: Report) -> Path:
        """Return a directory with all files of `listing`; reuses files of earlier calls."""
        kept_as = f"{encode_name(listing.repository)}@{encode_name(listing.commit)}"
        folder = self._private(self._root / ".downloads") / kept_as
        folder.mkdir(mode=0o700, exist_ok=True)
        for partial in folder.rglob("*.incomplete"):  # huggingface_hub never resumes a killed download
            partial.unlink()
        kept = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        self._require_space(listing.nbytes - kept)

        def on_file(done: int, file: str) -> None:
            report(done, listing.nbytes, "bytes", f"downloading {file}")

        hub.download(listing, folder, self._hub, on_file)
        return folder

    @contextlib.contextmanager
    def _staged(self, files: Mapping[str, Path], fetched: _Fetched, report: Report) -> Iterator[Path]:
        """Yield a directory with the files: moved there if `fetched.ours`, else copied."""
        done, nbytes = 0, sum(file.stat().st_size for file in files.values())
        if not fetched.ours:
            self._require_space(nbytes)
        with self._staging() as staging:
            for file, real in files.items():
                report(done, nbytes, "bytes", f"copying {file}")
                done += real.stat().st_size
                if fetched.ours:
                    os.rename(real, staging / file)
                else:
                    _copy(real, staging / file)
                (staging / file).chmod(0o600)
            yield staging

    def _take_in(self, fetched: _Fetched, report: Report) -> ModelVersion:
        """Stage, examine, try, repair, seal and publish a checkpoint."""
        files = choose_files(fetched.folder)
        nbytes = sum(file.stat().st_size for file in files.values())
        has_adapter = (fetched.folder / adapter.CONFIG_FILE).exists()
        with self._staged(files, fetched, report) as staging:
            facts = examine(staging, Layout.read(staging))
            report(nbytes, nbytes, "bytes", "testing its chat templates")
            tried = trial.try_folder(staging)
            report(nbytes, nbytes, "bytes", "comparing its tensors with its architecture")
            facts = put_right(staging, facts, tried, trial.compare(staging, facts.arch))
            warnings = list(facts.warnings)
            if has_adapter:
                warnings.append(
                    f"{adapter.CONFIG_FILE} and the adapter that it describes are not imported, only the model itself"
                )
            report(nbytes, nbytes, "bytes", "computing checksums")
            meta = {"source": fetched.source, **asdict(facts), "warnings": warnings}
            return self._publish(staging, "version", fetched.name, meta)

    def _publish(self, staging: Path, kind: str, name: str, meta: Mapping[str, Any]) -> ModelVersion:
        family = self._private(self._root / encode_name(name))
        highest = int(self._number_file(name).read_text()) if self._number_file(name).exists() else 0
        on_disk = [int(entry.name[1:]) for entry in family.iterdir() if re.fullmatch(r"v\d{1,9}", entry.name)]
        number = max([*on_disk, highest]) + 1
        seal_dir(staging, kind=kind, model=name, version=f"v{number}", meta=meta)
        for file in staging.iterdir():
            sync(file)
        replace_file(self._number_file(name), str(number).encode(), durable=True)
        os.rename(staging, family / f"v{number}")
        sync(family)
        return _described(family / f"v{number}")

    def _number_file(self, name: str) -> Path:
        """Return the file with this model's highest version number. The file outlives the model without revealing its
        name."""
        return self._private(self._root / ".numbers") / hashlib.sha256(name.encode()).hexdigest()[:32]

    def remove(self, name: str, version: str) -> None:
        """Delete a version, which disappears in one step. Idempotent."""
        DirectoryCopies(self._root).remove(Name("version", name, version))

    def _private(self, directory: Path) -> Path:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory

    def _require_space(self, needed_bytes: int) -> None:
        free = shutil.disk_usage(self._private(self._root)).free
        if needed_bytes > free - KEPT_FREE_BYTES:
            raise NotEnoughDisk(
                f"{self._root} has {free / 1e6:,.0f} MB free, this model needs {needed_bytes / 1e6:,.0f} MB and "
                f"{KEPT_FREE_BYTES / 1e6:,.0f} MB must stay free: free some (`appliance model rm`) or use another data "
                "directory"
            )

    @contextlib.contextmanager
    def _staging(self) -> Iterator[Path]:
        """Yield a directory for one import; files that are left in it are deleted."""
        staging = self._private(self._root / ".staging") / f"{os.getpid()}-{uuid.uuid4().hex}"
        staging.mkdir(mode=0o700)
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    """Copy a file. If the file system supports reflinks, the copy takes no time and no space."""
    with open(source, "rb") as old, open(target, "xb") as new:
        try:
            while os.copy_file_range(old.fileno(), new.fileno(), 1 << 30):
                pass
        except OSError:
            shutil.copyfileobj(old, new)  # no such copy between these file systems: copy the rest by reading


def _described(path: Path) -> ModelVersion:
    manifest = Manifest.read(path)
    known = {key: value for key, value in manifest.meta.items() if key in ModelVersion.__dataclass_fields__}
    return ModelVersion(name=manifest.model, version=manifest.version, path=path, bytes=manifest.nbytes, **known)


def _convert_gguf(file: Path, out: Path, report: Report) -> None:
    """Convert the model in `file` to a checkpoint in the new directory `out`. Raises CheckpointRefused,
    NotEnoughMemory."""
    report(0, None, "", f"reading {file.name}")

    def on_event(event: dict[str, Any]) -> None:
        report(event["done"], event["total"], "tensors", "dequantising")

    try:
        result = trial.run_trial(
            file.name, "train.convert.gguf", str(file), str(out), limit_s=CONVERT_S, on_event=on_event
        )
    except trial.TrialFailed as error:
        raise CheckpointRefused(file.name, f"its conversion {error}") from None
    if "refused" in result:
        raise CheckpointRefused(file.name, result["refused"])
    if "needed_bytes" in result:
        raise NotEnoughMemory(
            f"converting {file.name} needs {result['needed_bytes'] / 1e9:,.1f} GB of host memory, "
            f"{result['available_bytes'] / 1e9:,.1f} GB are available: stop other programs, let models sleep "
            "(`appliance mode set train`), or import the safetensors"
        )


def _keep_sampling(folder: Path, target: Path) -> None:
    """Copy sampling settings from a generation_config.json next to a GGUF file; the file itself has no such settings.
    Raises NotACheckpoint, UnsafeLink."""
    if not (folder / generation.FILE).exists():
        return
    source = read_json(regular(folder, generation.FILE), generation.FILE)
    config = read_json(target, generation.FILE) if target.is_file() else {}
    sampling = {key: source[key] for key in (*generation.SAMPLING, "max_new_tokens") if key in source}
    target.write_text(json.dumps({**config, **sampling}, indent=2))


def _is_path(source: str, revision: str | None) -> bool:
    """Whether a source is a path. Raises SourceNotFound for a path with a revision."""
    is_path = source.startswith((".", "/", "~")) or Path(source).exists()
    if is_path and revision is not None:
        raise SourceNotFound(f"{source} is a path; a revision can only be given for a hub repository")
    return is_path


def check_name(name: str) -> str:
    """Return `name` if it is a valid name for a base model. Raises InvalidModelName."""
    if not NAME.fullmatch(name) or len(name) > MAX_NAME_CHARACTERS or name.startswith("ft:"):
        raise InvalidModelName(
            f"{name[:200]!r} cannot be a model's name: expected letters, digits, '.', '_', '-' and '/' between parts, "
            f"at most {MAX_NAME_CHARACTERS} characters; give another with --name"
        )
    return name


def _gguf(path: Path) -> Path | None:
    """Return the GGUF file at a path: the file itself, or the only one in a directory without safetensors. Raises
    SourceNotFound, UnsafeLink."""
    if path.is_file():
        return path.resolve() if is_gguf(path) else None
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    matches = sorted(path.glob("*.gguf"))
    if len(matches) > 1:
        names = ", ".join(file.name for file in matches)
        raise SourceNotFound(f"{path} has {len(matches)} GGUF files ({names}); give the path of the one to import")
    # Check before opening: a link may lead out of the directory, and reading a pipe never ends.
    return real if matches and is_gguf(real := regular(path, matches[0].name)) else None


def _name_of(directory_name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", directory_name).strip("-._") or "model"
