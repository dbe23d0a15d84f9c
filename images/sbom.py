"""What the appliance is made of: a bill of materials (CycloneDX 1.6, JSON) of the packages of a build, with licences.

    python images/sbom.py [--build cpu|cuda] [--version V] > sbom.json     `make sbom` writes build/sbom.json
    python images/sbom.py --licences > images/licences.md    the same as a table for people

Versions and SHA-256 sums come from the lock file, licences and dependencies from what the packages installed here say
of themselves; what the page has from npm is listed beside it. Packages that only tests need are not part of it. Run it
with the environment's Python.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

IMAGES = Path(__file__).parent
PAGE = IMAGES.parent / "appliance" / "ui" / "static"
UNKNOWN = "not stated"
_PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?==(?P<version>[^ ;\\]+)(?: *; *(?P<marker>[^\\]*?))? *\\?$")


@dataclass(frozen=True)
class Vendored:
    """A package from npm of which a file lies in the page (appliance/ui/static/vendor)."""

    name: str
    version: str
    sha256: str
    licence: str

    @property
    def purl(self) -> str:
        return f"pkg:npm/{self.name}@{self.version}"


def vendored() -> list[Vendored]:
    """By package: its first file that says a licence."""
    found: dict[str, Vendored] = {}
    for line in (PAGE / "vendor" / "VENDORED.txt").read_text().splitlines():
        if not line.startswith("#"):
            _, name, version, _, digest, *terms = re.split(r"  +", line)
            if terms:
                found.setdefault(name, Vendored(name, version, digest, terms[0]))
    return list(found.values())


@dataclass
class Pin:
    """A line of the lock that applies to this machine."""

    name: str
    version: str
    sha256: list[str] = field(default_factory=list)

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version.replace('+', '%2B')}"


def pins(lock: str) -> list[Pin]:
    found: list[Pin] = []
    applies = False
    for line in lock.splitlines():
        if match := _PIN.match(line):
            marker = match["marker"]
            applies = not marker or Marker(marker).evaluate()
            if applies:
                found.append(Pin(canonicalize_name(match["name"]), match["version"]))
        elif applies and (digest := re.search(r"sha256:([0-9a-f]{64})", line)):
            found[-1].sha256.append(digest[1])
    return found


def licence(name: str) -> dict[str, Any] | None:
    """As CycloneDX writes it; None where the package is not installed."""
    try:
        metadata = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if expression := metadata.get("License-Expression"):
        return {"expression": expression}
    classified = [
        classifier.rpartition(" :: ")[2]
        for classifier in metadata.get_all("Classifier") or ()
        if classifier.startswith("License :: ") and classifier != "License :: OSI Approved"
    ]
    text = (metadata.get("License") or "").strip().partition("\n")[0]
    name_of_it = " and ".join(classified) or (text if 0 < len(text) <= 80 else "")
    return {"license": {"name": name_of_it or UNKNOWN}}


def said(found: dict[str, Any] | None) -> str:
    return UNKNOWN if found is None else found.get("expression") or found["license"]["name"]


def requires(name: str, known: dict[str, Pin]) -> Iterator[str]:
    """Packages of the lock that this one asks for here, without extras."""
    try:
        requirements = importlib.metadata.requires(name) or ()
    except importlib.metadata.PackageNotFoundError:
        return
    for text in requirements:
        requirement = Requirement(text)
        other = canonicalize_name(requirement.name)
        if other in known and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            yield known[other].purl


def bill(build: str, found: Sequence[Pin], now: datetime, own: str) -> dict[str, Any]:
    known = {pin.name: pin for pin in found}
    root = f"pkg:generic/appliance@{own}?build={build}"
    components = []
    for pin in found:
        terms = licence(pin.name)
        components.append(
            {
                "type": "library",
                "bom-ref": pin.purl,
                "name": pin.name,
                "version": pin.version,
                "purl": pin.purl,
                **({} if terms is None else {"licenses": [terms]}),
                # Of each file of this version: which of them is installed depends on the machine.
                "properties": [{"name": "appliance:lock:sha256", "value": digest} for digest in pin.sha256],
            }
        )
    page = vendored()
    for one in page:
        components.append(
            {
                "type": "library",
                "bom-ref": one.purl,
                "name": one.name,
                "version": one.version,
                "purl": one.purl,
                "licenses": [{"expression": one.licence}],
                "properties": [{"name": "appliance:file:sha256", "value": one.sha256}],
            }
        )
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([root, *components])).urn,
        "metadata": {
            "timestamp": now.isoformat(timespec="seconds"),
            "tools": {"components": [{"type": "application", "name": "images/sbom.py", "version": own}]},
            "component": {"type": "application", "bom-ref": root, "name": "appliance", "version": own},
        },
        "components": components,
        "dependencies": [
            {"ref": root, "dependsOn": sorted({*requires("appliance", known), *(one.purl for one in page)})},
            *({"ref": one.purl, "dependsOn": []} for one in page),
            *({"ref": pin.purl, "dependsOn": sorted(set(requires(pin.name, known)))} for pin in found),
        ],
    }


def table(found: Sequence[Pin]) -> str:
    rows = [f"| {pin.name} | {pin.version} | {said(licence(pin.name)).replace('|', '/')} |" for pin in found]
    rows += [f"| {one.name} | {one.version} | {one.licence} (npm, in the page) |" for one in vendored()]
    return (
        "\n".join(
            [
                "# Licences of the packages of the CPU build",
                "",
                "Written by `python images/sbom.py --licences`, from what each package says of itself.",
                "",
                "| package | version | licence |",
                "|---|---|---|",
                *rows,
            ]
        )
        + "\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--version", default=importlib.metadata.version("appliance"), help="of the appliance itself")
    parser.add_argument("--licences", action="store_true", help="a Markdown table instead")
    options = parser.parse_args(argv)
    found = pins((IMAGES / "requirements" / f"{options.build}.txt").read_text())
    if options.licences:
        sys.stdout.write(table(found))
    else:
        json.dump(bill(options.build, found, datetime.now(UTC), options.version), sys.stdout, indent=1)
        sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
