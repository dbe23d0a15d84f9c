"""Defines the file of a bundle: a shell script, followed by a zip archive that has a signed manifest of everything.

    header              a shell script; it finds the right Python and lets it run the archive
    __main__.py, appliance/bundle/carried/*.py      what is run; zipfile reads it, as it reads what is checked
    wheels/*.whl        all packages, pip and the appliance among them
    gateway/*.so        the gateway's hot modules, compiled
    share/...           documentation, the unit of systemd
    SBOM.cdx.json       what all of it is made of
    signer.pub          whose signature it bears
    manifest.json, manifest.json.minisig
    comment of the archive: END, the last bytes of the file

The manifest has the SHA-256 of the header and of every file but the last two and itself.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from appliance.bundle.carried.errors import BadSignature, CutShort, NotWhole, Unusable
from appliance.bundle.carried.signature import PublicKey, Signature

END = b"appliance-bundle-end"
MANIFEST, SIGNATURE, SIGNER = "manifest.json", "manifest.json.minisig", "signer.pub"
NAMED_BY_NONE = frozenset({MANIFEST, SIGNATURE})
FORMAT = 2
_READ = (1, 2)  # 1: its script had zipimport run the archive
MOST_OF_MANIFEST = 1 << 24
_PIECE = 1 << 20
_MOST_OF_HEADER = 1 << 16
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!_-]*")  # it is the name of a directory
_TEXTS = ("version", "build", "commit", "made", "python", "machine", "glibc", "soabi", "skip", "header_sha256")
_LOCAL, _DIRECTORY, _END = 30, 46, struct.Struct("<4s4H2LH")
_END_64, _EXTRA_64 = struct.Struct("<4sQ2H2L4Q4sLQL"), 28

# `tail` and `wc` belong to POSIX. The script exits before the archive, which is binary, so no shell reads it as script.
# Python would run the archive by itself (zipimport), but only one whose end is not written in 64 bits, which is how
# zipfile writes the end of more than 2 GiB: a bundle for GPUs did not start.
HEADER = """#!/bin/sh
# appliance {version}, {build} build, for Python {python} on Linux {machine}
#   sh FILE verify            is it whole, and whose is it?
#   sh FILE install DIR       into DIR/releases/{version}, beside other releases; needs no network
# The rest of this file is a zip archive.
if [ "$(tail -c {end_bytes} "$0" | tr -d '\\0')" != "{end}" ]; then
    echo "error: $0 was cut short: its end is missing, it has $(wc -c <"$0") bytes; copy it again" >&2
    exit 1
fi
for python in ${{PYTHON:-python{python} python3 python}}; do
    if "$python" -I -c 'import sys; sys.exit(sys.version_info[:2] != ({python_numbers}))' 2>/dev/null; then
        exec "$python" -I -c '
import importlib.abc, importlib.util, sys, zipfile

class Carried(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    def __init__(self, path):
        with zipfile.ZipFile(path) as archive:
            self.texts = {{name: archive.read(name) for name in archive.namelist() if name.endswith(".py")}}
    def name_of(self, module):
        names = [module.replace(".", "/") + end for end in ("/__init__.py", ".py")]
        return next((name for name in names if name in self.texts), None)
    def find_spec(self, module, path=None, target=None):
        return importlib.util.spec_from_loader(module, self) if self.name_of(module) else None
    def is_package(self, module):
        return self.name_of(module).endswith("/__init__.py")
    def get_source(self, module):
        return self.texts[self.name_of(module)].decode()

del sys.argv[0]
sys.meta_path.insert(0, Carried(sys.argv[0]))
exec(sys.meta_path[0].texts["__main__.py"])
' "$0" "$@"
    fi
done
echo "error: this needs Python {python}, which is not found; name it: PYTHON=/path/to/python{python} sh $0 ..." >&2
exit 1
"""


@dataclass(frozen=True)
class Content:
    """A file of a bundle, as the manifest describes it."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """python: "3.11". soabi: of compiled modules. glibc: the oldest that all wheels run with, "2.28".

    schema: of the database. installed_bytes: what it takes once unpacked. imports: modules that have to import in the
    end. system: what the machine has to have (images/requirements/system.json). skip: what is not byte-compiled, a
    regular expression. files: by name in the archive."""

    version: str
    build: str
    commit: str
    made: str
    schema: int
    python: str
    machine: str
    glibc: str
    soabi: str
    installed_bytes: int
    imports: tuple[str, ...]
    system: dict[str, Any]
    skip: str
    header_sha256: str
    files: dict[str, Content]
    format: int = FORMAT

    @property
    def header(self) -> bytes:
        return HEADER.format(
            version=self.version,
            build=self.build,
            python=self.python,
            python_numbers=self.python.replace(".", ", "),
            machine=self.machine,
            end=END.decode(),
            end_bytes=len(END),
        ).encode()

    def encoded(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Manifest:
        """Raises Unusable."""
        try:
            fields = json.loads(data)
            if fields["format"] not in _READ:
                raise Unusable(
                    f"this bundle has format {fields['format']!r}, known here is {FORMAT}; use its own: "
                    "`sh FILE verify`"
                )
            files = {name: Content(**content) for name, content in fields.pop("files").items()}
            found = cls(**{**fields, "imports": tuple(fields["imports"]), "files": files})
            if not all(type(getattr(found, name)) is str and getattr(found, name).isprintable() for name in _TEXTS):
                raise ValueError("it has something else where texts belong")
            if not all(name.isascii() and name.isprintable() for name in files):
                raise ValueError("files have names that are not plain text")
            if not _VERSION.fullmatch(found.version):
                raise ValueError("its version is none")
            return found
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise Unusable(f"the manifest cannot be read: {error!r}") from error


class Bundle:
    """An open bundle. Nobody may believe what it says before `verify`."""

    def __init__(self, path: Path):
        """Raises CutShort, Unusable."""
        self.path = path
        try:
            self._file = open(path, "rb")
        except OSError as error:
            raise Unusable(f"{path} cannot be read: {error.strerror}") from error
        try:
            self._zip = zipfile.ZipFile(self._file)
            if self._zip.comment != END and END.startswith(self._zip.comment):
                raise zipfile.BadZipFile("the end is missing")
            infos = self._zip.infolist()
            self.names = [info.filename for info in infos]
            # Nothing is unpacked, which could take for ever, and a terminal is shown nothing but text.
            if any(info.compress_type or info.flag_bits & 1 or not _plain(info) for info in infos):
                raise Unusable(
                    f"{path} is not a bundle of the appliance: it has packed files, or such as have no names"
                )
            # These are read whole before anything is verified.
            for name in {MANIFEST, SIGNATURE, SIGNER}.intersection(self.names):
                if self._zip.getinfo(name).file_size > MOST_OF_MANIFEST:
                    raise Unusable(f"{name} of {path} is larger than {MOST_OF_MANIFEST:,} bytes")
            # Read only once, so that the bytes that are used are the verified ones, even if somebody changes the file
            # meanwhile.
            self._manifest_read = self._zip.read(MANIFEST)
            self.manifest = Manifest.decoded(self._manifest_read)
            self.signature_text = self._zip.read(SIGNATURE).decode(errors="replace")
        except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError) as error:
            ours = self._starts_as_ours()
            self._file.close()
            if not ours:
                raise Unusable(f"{path} is not a bundle of the appliance") from error
            size = path.stat().st_size
            raise CutShort(f"{path} was cut short: its end is missing, it has {size:,} bytes; copy it again") from error
        except KeyError as error:
            self._file.close()
            raise Unusable(f"{path} is not a bundle of the appliance, or lost its manifest: {error.args[0]}") from error
        except Unusable:
            self._file.close()
            raise

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()
        self._file.close()

    @property
    def signer(self) -> PublicKey:
        """Returns the key that comes with the bundle. Raises Unusable."""
        if SIGNER not in self.names:
            raise Unusable(f"{SIGNER} is missing from {self.path}")
        return PublicKey.read(self._zip.read(SIGNER).decode(errors="replace"))

    def verify(self, trusted: Iterable[PublicKey]) -> PublicKey:
        """Reads every byte, and returns the trusted key whose signature the bundle bears.

        Raises BadSignature if another key or none signed it, NotWhole with everything that is wrong, Unusable."""
        signature, known = Signature.read(self.signature_text), {key.key_id: key for key in trusted}
        if signature.key_id not in known:
            names = ", ".join(key.name for key in known.values()) or "nobody"
            raise BadSignature(
                f"unknown signer: {self.path} is signed by {PublicKey(signature.key_id, b'').name}, trusted here is "
                f"{names}"
            )
        key = known[signature.key_id]
        try:
            signature.check(self._manifest_read, key)
        except BadSignature as error:
            raise BadSignature(f"changed: {MANIFEST}, or it was never signed: {error}") from error
        if problems := [*self._problems()]:
            raise NotWhole(problems)
        return key

    def extract(self, name: str, to: Path) -> None:
        """Writes one file if its content is that of the manifest. Raises NotWhole."""
        to.parent.mkdir(parents=True, exist_ok=True)
        with open(to, "wb") as file:
            wrong = self._wrong(name, file)
        if wrong:
            to.unlink()
            raise NotWhole([wrong])

    def _problems(self) -> Iterator[str]:
        named = self.manifest.files
        self._file.seek(0)
        first = min(info.header_offset for info in self._zip.infolist())
        head = self._file.read(min(first, _MOST_OF_HEADER))
        if hashlib.sha256(head).hexdigest() != self.manifest.header_sha256:
            yield "changed: the script at the beginning of the file"
        if self._zip.comment != END:
            yield "changed: the end of the file"
        if not self._has_one_reading(first):
            yield "changed: the archive, which whoever runs it may read in another way than whoever checks it"
        for name in sorted(set(named) - set(self.names)):
            yield f"missing: {name}"
        for name in sorted(set(self.names) - set(named) - NAMED_BY_NONE):
            yield f"extra: {name}"
        for name in sorted(name for name, count in Counter(self.names).items() if count > 1):
            yield f"extra: {name} is there more than once"
        for name in sorted(set(named) & set(self.names)):
            if wrong := self._wrong(name, None):
                yield wrong

    def _has_one_reading(self, at: int) -> bool:
        """Whether the file is what `make` writes: its files one behind the other from `at` on, their directory and the
        end, and nothing in between or beside them. Others read an archive in ways of their own: Python that is given
        the file (zipimport) goes by the numbers of the end alone, and by the bytes that are said to be packed."""
        infos = self._zip.infolist()
        for info in sorted(infos, key=lambda info: info.header_offset):
            self._file.seek(info.header_offset)
            local = self._file.read(_LOCAL)
            if len(local) < _LOCAL or info.header_offset != at or info.compress_size != info.file_size or info.comment:
                return False
            name, extra = struct.unpack_from("<2H", local, _LOCAL - 4)
            most = _EXTRA_64 if at + info.file_size > zipfile.ZIP64_LIMIT // 2 else 0  # sizes of more than 2 GiB
            if max(extra, len(info.extra)) > most:
                return False
            at += _LOCAL + name + extra + info.file_size
        size, count = sum(_DIRECTORY + len(info.filename) + len(info.extra) for info in infos), len(infos)
        end = _END.pack(b"PK\5\6", 0, 0, *2 * [min(count, 0xFFFF)], size, min(at, 0xFFFFFFFF), len(END)) + END
        if count >= zipfile.ZIP_FILECOUNT_LIMIT or max(size, at) > zipfile.ZIP64_LIMIT:
            further = (b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, at, b"PK\6\7", 0, at + size, 1)
            end = _END_64.pack(*further) + end
        self._file.seek(at + size)
        return self._file.read(len(end) + 1) == end

    def _wrong(self, name: str, to: BinaryIO | None) -> str:
        wanted = self.manifest.files[name]
        digest, count = hashlib.sha256(), 0
        try:
            with self._zip.open(name) as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
                    count += len(piece)
                    if to is not None:
                        to.write(piece)
        except (zipfile.BadZipFile, EOFError) as error:
            return f"changed: {name} ({type(error).__name__})"
        if (digest.hexdigest(), count) != (wanted.sha256, wanted.bytes):
            return f"changed: {name} has {count:,} bytes with SHA-256 {digest.hexdigest()[:12]}…"
        return ""

    def _starts_as_ours(self) -> bool:
        self._file.seek(0)
        ours = HEADER.partition("{")[0].encode()
        return self._file.read(len(ours)) == ours


def _plain(info: zipfile.ZipInfo) -> bool:
    """Whether a file has a name that is nothing but text, and the same for every reader."""
    return info.filename == info.orig_filename and info.filename.isascii() and info.filename.isprintable()
