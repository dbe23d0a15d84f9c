"""Runs what a bundle does by itself, and what `appliance bundle verify|install` does with one.

sh FILE verify [--key KEY]
sh FILE install DIR [--key KEY]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from appliance.bundle.carried.archive import Bundle
from appliance.bundle.carried.errors import BundleError, NotWhole
from appliance.bundle.carried.install import install
from appliance.bundle.carried.releases import Release, Releases
from appliance.bundle.carried.signature import PublicKey


def main(arguments: Sequence[str], own: Path | None) -> int:
    """own: the bundle that this code runs from; None: the first argument after the command names it. Exit code: 0 done,
    1 not done, 2 usage."""
    parser = argparse.ArgumentParser(
        prog=f"sh {own.name}" if own else "appliance bundle",
        description="One signed file with everything that the appliance is made of.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="is it whole, and whose is it?")
    into = commands.add_parser("install", help="install its release alongside others, without a network")
    for command in (verify, into):
        if own is None:
            command.add_argument("file", type=Path)
        command.add_argument("--key", help="the public key that must have signed it: its text, or a file")
        command.add_argument("--prefix", type=Path, help=argparse.SUPPRESS)
        command.add_argument("--json", action="store_true", help="one JSON document")
    into.add_argument("directory", type=Path, metavar="DIR", help="where releases lie side by side, as /opt/appliance")
    options = parser.parse_args(arguments)
    try:
        key = PublicKey.given(options.key) if options.key else None
        with Bundle(own or options.file) as bundle:
            if options.command == "verify":
                _verify(bundle, key, options.prefix, options.json)
            else:
                stream = sys.stderr if options.json else sys.stdout
                made = install(bundle, options.directory, key, lambda text: print(text, file=stream, flush=True))
                _installed(made, Releases(options.directory), options.json)
    except NotWhole as error:
        print(f"error: {own or options.file} is not what was signed:", *error.problems, sep="\n  ", file=sys.stderr)
        return 1
    except (BundleError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _verify(bundle: Bundle, key: PublicKey | None, prefix: Path | None, as_json: bool) -> None:
    trusted = [key] if key else Releases(prefix).trusted if prefix else []
    manifest, signer = bundle.manifest, bundle.verify(trusted or [bundle.signer])
    if as_json:
        shown = {name: getattr(manifest, name) for name in ("version", "build", "commit", "made", "schema", "python")}
        print(json.dumps({**shown, "files": len(manifest.files), "signer": signer.name, "trusted": bool(trusted)}))
        return
    print(f"appliance {manifest.version}, {manifest.build} build, made {manifest.made} from commit {manifest.commit}")
    print(f"whole: {len(manifest.files)} files as signed by {signer.name}")
    if not trusted:
        print(f"That key came with the file. Compare it with one that reached you otherwise:\n{signer.line}")


def _installed(release: Release, releases: Releases, as_json: bool) -> None:
    command, current = releases.prefix / "bin" / "appliance", releases.current
    if as_json:
        print(json.dumps({**asdict(release), "prefix": str(releases.prefix), "current": current}))
    elif current == release.version:
        unit = releases.prefix / "current" / "share" / "appliance.service"
        print(f"release {release.version} is installed and current: {command} up --detach\na unit for systemd: {unit}")
    else:
        print(f"release {release.version} is installed alongside {current}: {command} upgrade {release.version}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], None))
