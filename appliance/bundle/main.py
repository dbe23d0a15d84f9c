"""Makes, checks and installs bundles, and moves a box between releases, in a process of its own: the CLI calls it.

python -m appliance.bundle.main keygen|make|verify|install|list|remove|upgrade|rollback ...
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from appliance.bundle import make, signing, upgrade
from appliance.bundle.carried import main as carried
from appliance.bundle.carried.errors import BundleError, Refused
from appliance.bundle.carried.releases import Releases
from appliance.bundle.rollback import way_back


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 not done, 2 usage."""
    parser = argparse.ArgumentParser(prog="appliance bundle", description=__doc__)
    parser.add_argument("--json", action="store_true")
    commands = parser.add_subparsers(dest="command", required=True)
    keygen = commands.add_parser("keygen")
    keygen.add_argument("file", type=Path)
    made = commands.add_parser("make")
    made.add_argument("file", type=Path)
    made.add_argument("--key", type=Path, required=True)
    made.add_argument("--build")
    made.add_argument("--version")
    for command in ("verify", "install"):
        found = commands.add_parser(command)
        found.add_argument("file", type=Path)
        found.add_argument("--key")
        if command == "install":
            found.add_argument("directory", type=Path, nargs="?")
    commands.add_parser("list").add_argument("--prefix", type=Path)
    commands.add_parser("remove").add_argument("version")
    for command in ("upgrade", "rollback"):
        moved = commands.add_parser(command)
        moved.add_argument("--data-dir", type=Path, required=True)
        moved.add_argument("--timeout", type=float, required=True)
        if command == "upgrade":
            moved.add_argument("version")
        else:
            moved.add_argument("--yes", action="store_true")
            moved.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(argv)
    try:
        return _do(options)
    except (BundleError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _do(options: argparse.Namespace) -> int:
    match options.command:
        case "keygen":
            key = signing.new_key()
            key.write(options.file)
            public = signing.public_path(options.file)
            _tell(
                options.json,
                {"id": key.public.name, "secret": str(options.file), "public": str(public), "key": key.public.line},
                f"{options.file} signs: keep it offline. {public} is for everybody:\n{key.public.line}",
            )
        case "make":
            _make(options)
        case "verify" | "install":
            return _carried(options)
        case "list":
            _list(_own() if options.prefix is None else Releases(options.prefix), options.json)
        case "remove":
            releases = _own()
            with releases.alone():
                releases.remove(options.version)
            _tell(options.json, {"removed": options.version}, f"release {options.version} is removed")
        case "upgrade":
            releases = _own()
            before = releases.current
            upgrade.upgrade(releases, options.version, options.data_dir, options.timeout, _say)
            _tell(options.json, {"current": options.version, "before": before}, "done")
        case "rollback":
            return _rollback(options)
    return 0


def _make(options: argparse.Namespace) -> None:
    key = signing.SecretKey.read(options.key)
    made = make.make(options.file, key, build=options.build, version=options.version, say=_say)
    size = options.file.stat().st_size
    answer = {
        "file": str(options.file),
        "bytes": size,
        "files": len(made.files),
        "signer": key.public.name,
        **{
            name: getattr(made, name) for name in ("version", "build", "commit", "schema", "python", "machine", "glibc")
        },
    }
    words = (
        f"{options.file}: appliance {made.version}, {made.build} build for Python {made.python}, {size / 1e9:.2f} GB, "
        f"signed by {key.public.name}\nthere: sh {options.file.name} install /opt/appliance --key {key.public.line}"
    )
    _tell(options.json, answer, words)


def _carried(options: argparse.Namespace) -> int:
    try:
        own: Releases | None = _own()
    except Refused:
        own = None
    arguments = [options.command, str(options.file), *(["--key", options.key] if options.key else [])]
    if own is not None:
        arguments += ["--prefix", str(own.prefix)]
    if options.command == "install":
        directory = options.directory or (own.prefix if own else None)
        if directory is None:
            raise Refused("where to? `appliance bundle install FILE DIR` installs into DIR, /opt/appliance for one")
        arguments.append(str(directory))
    return carried.main([*arguments, *(["--json"] if options.json else [])], None)


def _list(releases: Releases, as_json: bool) -> None:
    current, before, found = releases.current, releases.before, releases.all()
    marks = {before: "before", current: "current"}
    rows = [{**asdict(one), "mark": marks.get(one.version)} for one in found]
    day = {one.version: time.strftime("%Y-%m-%d %H:%M", time.localtime(one.installed_s)) for one in found}
    lines = [
        f"{one.version:<12} {one.build:<5} commit {one.commit}, schema {one.schema}, installed {day[one.version]}"
        f"{'' if one.version not in marks else ', ' + str(marks[one.version])}"
        for one in found
    ]
    _tell(as_json, {"prefix": str(releases.prefix), "data": rows}, "\n".join(lines) or "no release")


def _rollback(options: argparse.Namespace) -> int:
    releases = _own()
    current, way = releases.current, way_back(releases, options.data_dir)
    _say(way.words())
    answer = {"from": current, "to": way.version, "lost": way.lost, "back": way.back, "done": not options.dry_run}
    if options.dry_run:
        _tell(options.json, answer, "nothing was done")
        return 0
    if way.copy is not None and not options.yes:
        if not sys.stdin.isatty():
            raise Refused("this loses what is said above: say --yes")
        if input(f"Go back to {way.version}? [y/N] ").strip().lower() not in ("y", "yes"):
            raise Refused("nothing was done")
    upgrade.rollback(releases, options.data_dir, way, options.timeout, _say)
    _tell(options.json, answer, "done")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _own() -> Releases:
    """Returns the folder of the release that runs this code. Raises Refused."""
    return Releases.of_environment(Path(sys.prefix))


def _tell(as_json: bool, answer: dict[str, Any], words: str) -> None:
    print(json.dumps(answer) if as_json else words)


if __name__ == "__main__":
    sys.exit(main())
