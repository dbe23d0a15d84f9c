"""The Kubernetes manifests: each overlay, rendered as by kustomize, validates strictly against Kubernetes schemas."""

import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from appliance.config import load_config

KUBERNETES = Path(__file__).resolve().parents[3] / "images" / "kubernetes"
VERSION = "1.34"
OVERLAYS = ("cpu", "cuda")


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def settings(folder: str) -> dict[str, Any]:
    (found,) = documents(KUBERNETES / folder / "kustomization.yaml")
    return found


def rendered(overlay: str) -> list[dict[str, Any]]:
    """Render an overlay like kustomize: supports only resources, image names and JSON patches."""
    found = [one for name in settings("box")["resources"] for one in documents(KUBERNETES / "box" / name)]
    told = settings(overlay)
    assert told["resources"] == ["../box"]
    for patch in told["patches"]:
        (target,) = [
            one
            for one in found
            if (one["kind"], one["metadata"]["name"]) == (patch["target"]["kind"], patch["target"]["name"])
        ]
        for change in yaml.safe_load(patch["patch"]):
            *way, last = change["path"].strip("/").split("/")
            at: Any = target
            for step in way:
                at = at[int(step)] if isinstance(at, list) else at[step]
            assert (last in at) == (change["op"] == "replace"), change
            at[last] = change["value"]
    (image,) = told["images"]
    container = pod(found)["containers"][0]
    assert container["image"] == image["name"]
    container["image"] = f"{image['newName']}:{image['newTag']}"
    return found


def pod(found: list[dict[str, Any]]) -> dict[str, Any]:
    (box,) = [one for one in found if one["kind"] == "StatefulSet"]
    return box["spec"]["template"]["spec"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_manifest_validates_against_kubernetes_schemas(overlay: str):
    found = rendered(overlay)
    assert {one["kind"] for one in found} == {"StatefulSet", "Service", "NetworkPolicy", "PodDisruptionBudget"}
    for one in found:
        kubernetes_validate.validate(one, VERSION, strict=True)
    found[0]["spec"]["template"]["spec"]["enableServiceLink"] = False
    with pytest.raises(kubernetes_validate.ValidationError, match="enableServiceLink"):
        kubernetes_validate.validate(found[0], VERSION, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pod_is_restricted_and_has_required_mounts(overlay: str):
    spec = pod(rendered(overlay))
    (box,) = spec["containers"]
    # Requirements of the Pod Security Standard "restricted".
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["seccompProfile"]["type"] != "Unconfined"
    assert box["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    # The image creates this user, and the process writes only to these paths.
    assert "--uid 1000" in (KUBERNETES.parent / f"Dockerfile.{overlay}").read_text()
    assert spec["securityContext"]["runAsUser"] == 1000
    written = {mount["mountPath"] for mount in box["volumeMounts"] if not mount.get("readOnly")}
    assert written == {"/data", "/dev/shm", "/tmp"}
    assert "livenessProbe" not in box
    # A Service named `appliance` would set APPLIANCE_PORT to tcp://10.0.0.1:8000, which is not a port number.
    assert spec["enableServiceLinks"] is False
    (shm,) = [volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == "shm"]
    assert shm["medium"] == "Memory"
    limits = box["resources"]["limits"]
    assert int(shm["sizeLimit"].removesuffix("Gi")) < int(limits["memory"].removesuffix("Gi"))
    assert limits["memory"] == box["resources"]["requests"]["memory"]
    assert limits.get("nvidia.com/gpu") == (8 if overlay == "cuda" else None)


def test_mounted_settings_are_loaded_by_the_box():
    (generated,) = settings("box")["configMapGenerator"]
    assert generated["files"] == ["appliance.toml"]
    (box,) = pod(rendered("cpu"))["containers"]
    environ = {one["name"]: one["value"] for one in box["env"]}
    assert environ.pop("APPLIANCE_CONFIG") == "/etc/appliance/appliance.toml"
    path = KUBERNETES / "box" / "appliance.toml"
    config = load_config(path, {}, environ)
    assert config.box.serving_floor == tomllib.loads(path.read_text())["box"]["serving_floor"]
    assert config.box.data_dir == "/data/box"
