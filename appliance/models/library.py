"""The models on disk: `<models>/<name>/<version>/`, each a checkpoint directory with a sealed manifest.

Everything here blocks: call it in a worker thread. A version appears by one rename after all its bytes were checked and
are on the medium. What a crash leaves is in `.staging`, and the next import removes it. The number of a version never
comes again, though it was deleted: engines, other nodes, tiers and estimates know it by name and number alone.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from appliance.models import adapter, checkpoint_trial, hub
from appliance.models.checkpoint import Files, Task, choose_files, examine, regular
from appliance.models.errors import InvalidModelName, NotEnoughDisk, NotEnoughMemory, SourceNotFound
from appliance.models.folder_trial import try_folder
from appliance.models.put_right import check_numbers, put_right
from appliance.models.trial_process import TrialFailed, TrialProcess
from runtime.replace_file import replace_file
from train.convert.gguf import is_gguf
from weights.checkpoint import generation
from weights.checkpoint.errors import CheckpointRefused, NotACheckpoint
from weights.checkpoint.folder import read_json
from weights.format.files import sync
from weights.format.layout import Layout
from weights.format.manifest import Manifest
from weights.format.names import decode_name, encode_name
from weights.tiers.directory import DirectoryTier, seal_dir, verify
from weights.tiers.record import Name

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
MAX_NAME_CHARACTERS = 128
COPY_CHUNK_BYTES = 1 << 30
KEPT_FREE_BYTES = 256 << 20  # of the disk, for database, logs and jobs
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

Report = Callable[[float, float | None, str, str], None]
"""`report(done, total, unit, message)`; an exception that it raises cancels the work."""


def silent(done: float, total: float | None, unit: str, message: str) -> None:
    """The Report that nobody reads."""


@dataclass(frozen=True)
class ModelVersion:
    """A version on disk. `bytes` counts tensors and described files; `info` is for people."""

    name: str
    version: str
    path: Path
    arch: str
    task: Task
    params: int
    bytes: int
    max_model_len: int | None
    source: str
    warnings: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)


class ModelLibrary:
    """All models below `models_dir` (made 0700). One process at a time may import; any number may read."""

    def __init__(
        self,
        models_dir: Path,
        *,
        hub_settings: hub.HubSettings | None = None,
    ):
        self._root = Path(models_dir)
        self._hub = hub_settings or hub.HubSettings()

    def import_model(
        self, source: str, *, name: str | None = None, revision: str | None = None, report: Report = silent
    ) -> ModelVersion:
        """Imports the directory or GGUF file at `source` if there is one, else a hub repository. Raises ModelError,
        IntegrityError."""
        if _is_path(source):
            _refuse_revision(source, revision)
            return self.import_path(Path(source).expanduser(), name=name, report=report)
        return self.import_hub(source, name=name, revision=revision, report=report)

    def import_path(self, path: Path, *, name: str | None = None, report: Report = silent) -> ModelVersion:
        """Copies the checkpoint directory `path` in as a new version of `name` (default: the directory's name).

        It takes safetensors, configuration, tokenizer and README.md, and leaves code, pickles and sub-directories.
        Raises CheckpointRefused, weights.format.errors.IntegrityError (a damaged or hostile weight file, by name),
        NotEnoughDisk, InvalidModelName, SourceNotFound.
        """
        if (file := _gguf(path)) is not None:
            return self._import_gguf(file, name, report)
        if path.is_dir() and adapter.is_adapter(path):
            raise NotACheckpoint(
                "",
                f"{path} is an adapter's directory; expected a checkpoint with config.json and weights. An adapter is "
                "imported together with its base (`appliance model import DIR --base NAME`)",
            )
        if not path.is_dir():
            what = "is a file and no GGUF" if path.exists() else "does not exist"
            raise SourceNotFound(
                f"{path} {what}; expected the directory of a checkpoint (config.json, *.safetensors) or a .gguf file"
            )
        chosen_name = check_name(name if name is not None else _name_of(path.resolve().name))
        return self._take_in(path.resolve(), chosen_name, source=str(path.resolve()), meta={}, report=report)

    def find_adapter(
        self, source: str, *, name: str | None = None, revision: str | None = None
    ) -> tuple[str, str, str | None] | None:
        """What the adapter `source`, a directory or a hub repository, would be called, the base that it names ("" for
        none) and its commit on the hub; None if `source` is anything else. Only the listing and adapter_config.json of
        a repository are fetched. Raises CheckpointRefused, InvalidModelName, SourceNotFound, HubError."""
        if not _is_path(source):
            return self._find_adapter_on_hub(source, name, revision)
        path = Path(source).expanduser()
        if not path.is_dir() or not adapter.is_adapter(path):
            return None
        _refuse_revision(source, revision)
        return check_name(name if name is not None else _name_of(path.resolve().name)), adapter.read_base(path), None

    def _find_adapter_on_hub(
        self, repository: str, name: str | None, revision: str | None
    ) -> tuple[str, str, str | None] | None:
        hub.check_reference(repository, revision)
        chosen_name = check_name(name if name is not None else repository)
        listing = hub.list_files(repository, revision, self._hub)
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
        """Takes peft's adapter `source`, a directory or a hub repository at `revision`, in as a version of `name`.

        It is to be served beside `base` `base_version`, whose files are in `base_path` and whose engines take ranks up
        to `rank_limit`.

        It takes adapter_config.json, adapter_model.safetensors and README.md. Raises CheckpointRefused,
        weights.format.errors.IntegrityError, NotEnoughDisk, HubError.
        """
        self._sweep()
        local, origin = _is_path(source), {"source": source}
        if local:
            path = Path(source).expanduser().resolve()
            origin["source"] = str(path)
        else:
            report(0, None, "", f"asking the hub for the files of {source}")
            listing = hub.list_files(source, revision, self._hub)
            path = self._downloaded(listing, report)
            origin = self._origin(listing)
        files = adapter.choose_files(path)
        self._require_space(files.nbytes if local else 0)
        with self._staging(files.nbytes) as staging:
            _fill(staging, files, report, move=not local)
            layout, below = Layout.read(staging), Layout.read(base_path)
            facts = adapter.examine(staging, layout, base=base, base_layout=below, rank_limit=rank_limit)
            check_numbers(staging, layout)
            meta = {
                **origin,
                "params": facts.params,
                "base": base,
                "base_version": base_version,
                "warnings": adapter.template_note(path, base, base_path) if local else [],
                "info": {
                    "adapter": {"rank": facts.rank, "trained_on": facts.base, "modules": list(facts.modules)},
                },
            }
            taken = self._publish(staging, "adapter", name, meta)
        if not local:
            shutil.rmtree(path)
        return taken

    def _import_gguf(self, file: Path, name: str | None, report: Report) -> ModelVersion:
        """Converts a GGUF file to bfloat16 in a process of its own and takes the result in."""
        chosen_name = check_name(name if name is not None else _name_of(file.stem))
        # At the least: bfloat16 has 16 bits for what the file may have in 4.
        with self._made("gguf", file.stat().st_size) as made:
            facts = _convert_gguf(file, made, report)
            _keep_sampling(file.parent, made / generation.FILE)
            meta = {"converted_from": "gguf"} | facts
            return self._take_in(made, chosen_name, source=str(file), meta=meta, report=report, move=True)

    def import_hub(
        self, repository: str, *, name: str | None = None, revision: str | None = None, report: Report = silent
    ) -> ModelVersion:
        """Downloads `repository` (at `revision`, default main) and takes it in under its own name or `name`.

        Called again after an interruption, it downloads the missing files. Raises as `import_path`, and HubError.
        """
        hub.check_reference(repository, revision)
        chosen_name = check_name(name if name is not None else repository)
        report(0, None, "", f"asking the hub for the files of {repository}")
        listing = hub.list_files(repository, revision, self._hub)
        meta, folder = self._origin(listing), self._downloaded(listing, report)
        taken = self._take_in(folder, chosen_name, source=meta.pop("source"), meta=meta, report=report, move=True)
        shutil.rmtree(folder)
        return taken

    def _origin(self, listing: hub.Listing) -> dict[str, str]:
        """What a manifest says of where a download came from."""
        return {
            "source": f"{listing.repository}@{listing.commit}",
            "repository": listing.repository,
            "commit": listing.commit,
            "endpoint": self._hub.endpoint,
        }

    def _downloaded(self, listing: hub.Listing, report: Report) -> Path:
        """The directory with all files of `listing`; what an earlier call left there is kept."""
        kept_as = f"{encode_name(listing.repository)}@{encode_name(listing.commit)}"
        folder = self._private(self._root / ".downloads") / kept_as
        folder.mkdir(mode=0o700, exist_ok=True)
        for partial in folder.rglob("*.incomplete"):  # of a download that was killed: huggingface_hub never resumes it
            partial.unlink()
        kept = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        self._require_space(listing.nbytes - kept)

        def on_file(done: int, file: str) -> None:
            report(done, listing.nbytes, "bytes", f"downloading {file}")

        with self._room_for(listing.nbytes):
            hub.download(listing, folder, self._hub, on_file)
        return folder

    @contextlib.contextmanager
    def _made(self, kind: str, least_bytes: int) -> Iterator[Path]:
        """A path where another process makes a checkpoint of at least this many bytes; what is left there goes. Raises
        NotEnoughDisk."""
        self._sweep()
        self._require_space(least_bytes)
        made = self._private(self._root / ".staging") / f"{kind}-{os.getpid()}-{uuid.uuid4().hex}"
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def _take_in(
        self, directory: Path, name: str, *, source: str, meta: Mapping[str, Any], report: Report, move: bool = False
    ) -> ModelVersion:
        """Copies the files (moves them if they are ours already), examines, seals and publishes them."""
        self._sweep()
        files = choose_files(directory)
        if not move:
            self._require_space(files.nbytes)
        with self._staging(files.nbytes) as staging, checkpoint_trial.begun() as trial:
            _fill(staging, files, report, move=move)
            facts = examine(staging, Layout.read(staging))
            report(files.nbytes, files.nbytes, "bytes", "trying its tokenizer and chat template")
            tried = try_folder(staging)
            report(files.nbytes, files.nbytes, "bytes", "comparing its tensors with its architecture")
            found = trial.result(staging, facts.arch)
            facts = put_right(staging, facts, tried, found)
            if adapter.CONFIG_FILE in files.left:
                left = (
                    f"{adapter.CONFIG_FILE} and the adapter that it describes stay behind: the model is imported alone"
                )
                facts = replace(facts, warnings=(*facts.warnings, left))
            report(files.nbytes, files.nbytes, "bytes", "computing checksums")
            described = {
                "source": source,
                "arch": facts.arch,
                "task": facts.task,
                "params": facts.params,
                "max_model_len": facts.max_model_len,
                "warnings": list(facts.warnings),
                "info": dict(facts.info),
            }
            return self._publish(staging, "version", name, {**meta, **described})

    def _publish(self, staging: Path, kind: str, name: str, meta: Mapping[str, Any]) -> ModelVersion:
        family = self._private(self._root / encode_name(name))
        while True:
            number = self._next_number(name, family)
            version = f"v{number}"
            seal_dir(staging, kind=kind, model=name, version=version, meta=meta)
            for file in staging.iterdir():
                sync(file)
            replace_file(self._given(name), str(number).encode(), durable=True)
            try:
                os.rename(staging, family / version)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    continue  # this number was taken meanwhile, by a published fine-tune for instance
                raise
            sync(family)
            return self.show(name, version)

    def _next_number(self, name: str, family: Path) -> int:
        numbers = [int(entry.name[1:]) for entry in family.iterdir() if re.fullmatch(r"v\d{1,9}", entry.name)]
        given = self._given(name)
        return max([*numbers, int(given.read_text()) if given.exists() else 0]) + 1

    def _given(self, name: str) -> Path:
        """A file with the highest number that a version of this model had. It outlives the model, and does not tell its
        name."""
        return self._private(self._root / ".numbers") / hashlib.sha256(name.encode()).hexdigest()[:32]

    def list(self) -> list[ModelVersion]:
        """Every version on disk, by name and version number. Damaged ones are left out; `verify` names them."""
        found = []
        for family in sorted(self._root.iterdir()) if self._root.is_dir() else []:
            name = decode_name(family.name)
            if name is None or family.name.startswith(".") or not family.is_dir():
                continue
            for directory in sorted(family.iterdir(), key=lambda entry: (len(entry.name), entry.name)):
                if (directory / "manifest.json").is_file() and not directory.name.startswith("."):
                    found.append(self.show(name, directory.name))
        return found

    def show(self, name: str, version: str) -> ModelVersion:
        """Raises weights.format.errors.ManifestInvalid if there is no such version or its manifest is damaged."""
        path = self.path(name, version)
        manifest = Manifest.read(path)
        meta = manifest.meta
        return ModelVersion(
            name=name,
            version=version,
            path=path,
            arch=meta.get("arch", ""),
            task=meta.get("task", "generate"),
            params=meta.get("params", 0),
            bytes=manifest.nbytes,
            max_model_len=meta.get("max_model_len"),
            source=meta.get("source", ""),
            warnings=tuple(meta.get("warnings", ())),
            info=meta.get("info", {}),
        )

    def path(self, name: str, version: str) -> Path:
        """Where a version stands or would stand. Raises weights.format.errors.InvalidName."""
        return self._root / encode_name(name) / encode_name(version)

    def verify(self, directory: Path) -> dict[str, int]:
        """Reads every byte of a version (on disk or in shared memory) and compares it with its manifest.

        Returns {"tensors", "bytes"}. Raises weights.format.errors.IntegrityError naming the file.
        """
        manifest = verify(directory)
        return {"tensors": manifest.tensors, "bytes": manifest.nbytes}

    def remove(self, name: str, version: str) -> bool:
        """Deletes a version; False if there was none. It is out of sight in one step, whatever happens then."""
        return DirectoryTier(self._root).remove(Name("version", name, version))

    def _private(self, directory: Path) -> Path:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory

    def _require_space(self, needed_bytes: int) -> None:
        free = shutil.disk_usage(self._private(self._root)).free
        if needed_bytes > free - KEPT_FREE_BYTES:
            raise NotEnoughDisk(str(self._root), needed_bytes, free, KEPT_FREE_BYTES)

    @contextlib.contextmanager
    def _staging(self, nbytes: int) -> Iterator[Path]:
        """A directory for one import of this many bytes; what is not renamed out of it goes. Raises NotEnoughDisk."""
        staging = self._private(self._root / ".staging") / f"{os.getpid()}-{uuid.uuid4().hex}"
        try:
            with self._room_for(nbytes):
                staging.mkdir(mode=0o700)
                yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    @contextlib.contextmanager
    def _room_for(self, nbytes: int) -> Iterator[None]:
        """There was room for this many bytes, and others write too: raises NotEnoughDisk where the block finds none."""
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            free = shutil.disk_usage(self._root).free
            raise NotEnoughDisk(str(self._root), nbytes, free, KEPT_FREE_BYTES) from error

    def _sweep(self) -> None:
        """Removes what dead processes left in `.staging`. Downloads stay: they are there to be continued."""
        staging = self._root / ".staging"
        for entry in staging.iterdir() if staging.is_dir() else ():
            owner = re.search(r"(\d+)-[0-9a-f]{32}", entry.name)
            if owner is None or not Path(f"/proc/{owner[1]}").exists():
                shutil.rmtree(entry, ignore_errors=True)


def _fill(staging: Path, files: Files, report: Report, *, move: bool) -> None:
    done = 0
    for file, real in files.taken.items():
        report(done, files.nbytes, "bytes", f"copying {file}")
        done += real.stat().st_size
        if move:
            os.rename(real, staging / file)
            (staging / file).chmod(0o600)
        else:
            _copy(real, staging / file)


def _copy(source: Path, target: Path) -> None:
    """A new file, 0600. It shares the blocks where the file system can (reflink)."""
    with open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW), "rb") as old, open(target, "xb") as new:
        os.fchmod(new.fileno(), 0o600)
        try:
            while os.copy_file_range(old.fileno(), new.fileno(), COPY_CHUNK_BYTES):
                pass
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise
            shutil.copyfileobj(old, new)  # between these file systems; from where it stopped


def _convert_gguf(file: Path, out: Path, report: Report) -> dict[str, Any]:
    """Writes the model in `file` as a checkpoint directory into the new directory `out`; returns what the file says of
    itself. Raises CheckpointRefused, NotEnoughMemory."""
    report(0, None, "", f"reading {file.name}")
    try:
        with TrialProcess(file.name, "train.convert.gguf", str(file), str(out)) as process:
            facts = process.events(lambda event: report(event["done"], event["total"], "tensors", "dequantising"))
    except TrialFailed as error:
        raise CheckpointRefused(file.name, f"its conversion {error}") from None
    if "refused" in facts:
        raise CheckpointRefused(file.name, facts["refused"])
    if "needed_bytes" in facts:
        raise NotEnoughMemory(file.name, facts["needed_bytes"], facts["available_bytes"])
    return facts


def _keep_sampling(folder: Path, made: Path) -> None:
    """A GGUF file says nothing of sampling; what a generation_config.json beside it says is taken over. Raises
    NotACheckpoint, UnsafeLink."""
    if not (folder / generation.FILE).exists():
        return
    told = read_json(regular(folder, generation.FILE), generation.FILE)
    config = read_json(made, generation.FILE) if made.is_file() else {}
    sampling = {key: told[key] for key in (*generation.SAMPLING, "max_new_tokens") if key in told}
    made.write_text(json.dumps({**config, **sampling}, indent=2))


def _is_path(source: str) -> bool:
    return source.startswith((".", "/", "~")) or Path(source).exists()


def _refuse_revision(source: str, revision: str | None) -> None:
    if revision is not None:
        raise SourceNotFound(f"{source} is a path; a revision can only be given for a hub repository")


def check_name(name: str) -> str:
    """Returns `name` if a base model may have it. Raises InvalidModelName."""
    if not NAME.fullmatch(name) or len(name) > MAX_NAME_CHARACTERS or name.startswith("ft:"):
        raise InvalidModelName(
            f"{name[:200]!r} cannot be a model's name: expected letters, digits, '.', '_', '-' and '/' between parts, "
            f"at most {MAX_NAME_CHARACTERS} characters; give another with --name"
        )
    return name


def _gguf(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one in a directory without safetensors. Raises
    SourceNotFound, UnsafeLink."""
    if path.is_file():
        return path.resolve() if is_gguf(path) else None
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise SourceNotFound(f"{path} has {len(found)} GGUF files ({names}); give the path of the one to import")
    # Looked at before it is opened: a link may lead out of the directory, and a pipe has no end.
    return real if found and is_gguf(real := regular(path, found[0].name)) else None


def _name_of(directory_name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", directory_name).strip("-._") or "model"
