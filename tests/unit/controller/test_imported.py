"""Adapters coming in: which base they are served on, for whom they are, what is refused before any byte is copied."""

from __future__ import annotations

import pytest

from appliance.store.objects import models
from tests.unit.controller.conftest import Control, insert_model
from tests.unit.controller.test_admin import ask, ended


@pytest.fixture
def roomy(control: Control) -> Control:
    """Engines take adapters, and the starter's files are on disk."""
    control.context.sizes.adapter_rank_limit = lambda row: 32
    models.update_version(control.db, "starter", "v1", disk_path="/models/starter/v1")
    return control


@pytest.mark.parametrize("source", ["/data/adapter-of-starter", "/data/adapter"])
async def test_an_adapter_is_served_on_the_base_that_it_or_the_user_names(roomy: Control, source: str):
    body = {"source": source, "name": "pirate"} | ({} if "starter" in source else {"base": "starter"})
    done = await ended(roomy, await ask(roomy, "POST", "/models/import", 202, json=body))
    assert done["state"] == "succeeded"
    (row,) = models.callable_adapters(roomy.db)
    assert (row.name, row.model, row.base, row.base_version) == ("pirate", "pirate", "starter", "v1")
    assert row.host == "starter"
    model, base = models.find(roomy.db, "pirate"), models.find(roomy.db, "starter")
    assert (model.kind, model.base, model.arch, model.max_model_len) == ("fine-tuned", "starter", base.arch, 2048)
    assert models.shared_with(roomy.db, "pirate") == models.shared_with(roomy.db, "starter") == ["*"]
    assert (await ask(roomy, "GET", "/models/pirate"))["adapter"]["rank"] == 8


async def test_a_model_out_of_a_package_says_which_and_not_a_path_that_is_gone(roomy: Control):
    body = {"source": "/tmp/x/m.gguf", "name": "tiny", "origin": "package tiny==1.0"}
    await ended(roomy, await ask(roomy, "POST", "/models/import", 202, json=body))
    shown = await ask(roomy, "GET", "/models/tiny")
    assert [shown["source"], *(version["source"] for version in shown["versions"])] == ["package tiny==1.0"] * 2
    error = await ask(roomy, "POST", "/models/import", 400, json={"source": "/x", "origin": "a\nb"})
    assert error["error"]["param"] == "origin"


async def test_import_as_version_leaves_the_active_version_and_names_base_models_only(roomy: Control):
    models.update_version(roomy.db, "starter", "v1", version="v0")
    models.update(roomy.db, "starter", active_version="v0")
    body = {"source": "/data/whole", "name": "starter", "as_version": True}
    done = await ended(roomy, await ask(roomy, "POST", "/models/import", 202, json=body))
    shown = await ask(roomy, "GET", "/models/starter")
    assert done["state"] == "succeeded" and shown["active_version"] == "v0"
    assert {version["version"] for version in shown["versions"]} == {"v0", done["result"]["version"]}
    error = await ask(roomy, "POST", "/models/import", 400, json=body | {"name": "nosuch"})
    assert error["error"]["param"] == "name"


async def test_an_adapter_of_a_private_base_is_private_too(roomy: Control):
    models.unshare(roomy.db, "starter", "*")
    models.share(roomy.db, "starter", "ann")
    await ended(roomy, await ask(roomy, "POST", "/models/import", 202, json={"source": "/data/adapter-of-starter"}))
    assert models.shared_with(roomy.db, "adapter-of-starter") == ["ann"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"source": "/data/adapter"}, 400, "base"),
        ({"source": "/data/adapter", "base": "nosuch"}, 400, "base"),
        ({"source": "/data/adapter", "base": "tuned"}, 400, "base"),
        ({"source": "/data/whole", "base": "starter"}, 400, "base"),
        ({"source": "/data/starter/adapter", "name": "starter"}, 409, "name"),
        ({"source": "/x/adapter-starter", "base": "cold"}, 409, "base"),
    ],
)
async def test_an_adapter_without_a_base_is_refused(roomy: Control, body, status, param):
    insert_model(roomy.db, "tuned", kind="fine-tuned", base="starter")
    models.update_version(roomy.db, "tuned", "v1", meta={"adapter": {"base": "starter", "base_version": "v1"}})
    insert_model(roomy.db, "cold")
    models.update_version(roomy.db, "cold", "v1", disk_path=None, shm_path=None)
    assert (await ask(roomy, "POST", "/models/import", status, json=body))["error"]["param"] == param


async def test_what_an_adapter_never_uses_of_a_deployment_is_refused(roomy: Control):
    await ended(roomy, await ask(roomy, "POST", "/models/import", 202, json={"source": "/data/adapter-of-starter"}))
    path = "/models/adapter-of-starter"
    for field, value in (("idle_sleep_s", 60), ("tensor_parallel", 2), ("max_replicas", 1), ("ttft_p95_s", 2)):
        error = (await ask(roomy, "PATCH", f"{path}/deployment", 400, json={"pinned": True, field: value}))["error"]
        assert error["param"] == field
    wish = {"pinned": True, "min_replicas": 1, "idle_sleep_s": None}
    assert (await ask(roomy, "PATCH", f"{path}/deployment", json=wish)).items() >= wish.items()
    await ask(roomy, "PATCH", f"{path}/settings", 400, json={"set": {"max_num_seqs": 2}})
