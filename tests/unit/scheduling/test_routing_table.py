"""The routing table routes an adapter only to engines that serve the base version of the adapter."""

import pytest

from appliance.controller.bus.bus import ModelLoad, Report
from appliance.store import jobs, models
from appliance.store.rows import CANARIES, CanaryRow, JobRow, VersionRow
from scheduler.core.failures import Failure
from tests.unit.scheduling.fakes import routing_of
from weights.format.names import policy_name

SOCKET = "/run/r1.sock"


class RecordingBus:
    """A bus whose gateways apply each table at once and report the load `reported`."""

    def __init__(self):
        self.table, self.generation, self.reported = {}, 0, Report()

    def publish(self, models):
        if models != self.table:
            self.table, self.generation = models, self.generation + 1
        return self.generation

    def load(self):
        return self.reported

    async def wait_applied(self, generation):
        assert generation == self.generation


@pytest.fixture
def bus():
    return RecordingBus()


@pytest.fixture
def routing(bus, db, add_model, add_adapter):
    add_model()
    add_adapter("ft:a")
    add_adapter("ft:b")
    return routing_of(bus, db)


async def test_adapter_row_names_version_and_has_engines_of_base(routing, bus, db):
    await routing.open("r1", "starter", "v1", SOCKET)
    row = bus.table["ft:a"]
    assert (row["adapter"], row["version"]) == ("ft:a@step-2", "step-2")
    assert row["replicas"] == [{"id": "r1", "socket": SOCKET, "version": "step-2", "state": "open", "avoid": False}]
    assert row["host"] == "starter" and not bus.table["starter"]["adapter"] and not bus.table["starter"]["host"]
    models.activate(db, "ft:a", "step-1")
    await routing.wait_applied()
    assert bus.table["ft:a"]["adapter"] == "ft:a@step-1" and bus.table["ft:b"]["adapter"] == "ft:b@step-2"
    models.delete(db, "ft:a")
    routing.refresh()
    assert set(bus.table) == {"starter", "starter@v1", "ft:b", "ft:b@step-2"}


async def test_hanging_engine_is_avoided_if_reported_before_open(routing, bus):
    routing.avoid("r1", True)  # a restarted controller learns of the hang before it opens the route
    await routing.open("r1", "starter", "v1", SOCKET)
    assert bus.table["starter"]["replicas"][0]["avoid"] is True and routing.open_engines() == {}
    routing.avoid("r1", False)
    assert not bus.table["starter"]["replicas"][0]["avoid"]
    assert routing.open_engines() == {"r1": ("starter", SOCKET)}
    routing.avoid("r1", True)
    routing.close("r1")
    await routing.open("r1", "starter", "v1", SOCKET)
    assert not bus.table["starter"]["replicas"][0]["avoid"], "another engine has its name"


async def test_new_base_version_ends_routes_of_adapters_only(routing, bus, db):
    await routing.open("r1", "starter", "v1", SOCKET)
    await routing.withhold_adapters("r1")
    assert bus.table["ft:a"]["replicas"] == [] and bus.table["starter"]["replicas"]
    routing.offer_adapters("r1")
    assert bus.table["ft:a"]["replicas"]
    models.insert_version(db, VersionRow("starter", "v2", "here", 10, 1.0, disk_path="/m"))
    models.activate(db, "starter", "v2")
    await routing.open("r1", "starter", "v2", SOCKET)
    assert bus.table["ft:a"]["replicas"] == []
    await routing.open("r2", "starter@v1", "v1", "/run/r2.sock")
    assert [replica["id"] for replica in bus.table["ft:a"]["replicas"]] == ["r2"]
    assert [replica["id"] for replica in bus.table["starter"]["replicas"]] == ["r1"]


async def test_model_in_training_is_routed_to_its_base_version(routing, bus):
    name = policy_name("ftjob-1")
    await routing.open("r1", "starter", "v1", SOCKET)
    await routing.offer_policy(name, "starter", "v1", "")
    row = bus.table[name]
    assert row["host"] == "starter" and not row["adapter"] and [one["id"] for one in row["replicas"]] == ["r1"]
    assert row["slots"] == bus.table["starter"]["slots"] and routing.host(name) == "starter"
    await routing.open("r2", "starter", "v1", "https://10.0.0.2:4000")
    assert [one["id"] for one in bus.table[name]["replicas"]] == ["r1"], "the other machine does not have it"
    assert len(bus.table["ft:a"]["replicas"]) == 2
    await routing.withhold_adapters("r1")
    assert bus.table[name]["replicas"] == []
    routing.offer_adapters("r1")
    await routing.offer_policy(name, "starter", "v0", "")
    assert bus.table[name]["replicas"] == []
    routing.keep_policies(lambda one: one == name)
    assert name in bus.table
    routing.keep_policies(lambda one: False)
    assert name not in bus.table


def load(*reported, tokens, **more):
    waiting, per_s, prompt = tokens
    return ModelLoad(*reported, waiting_prompt_tokens=waiting, prefill_tokens_per_s=per_s, prompt_tokens=prompt, **more)


async def test_demand_of_adapters_counts_for_their_base(routing, bus):
    await routing.open("r1", "starter", "v1", SOCKET)
    bus.reported = Report(
        replicas={"r1": 4},
        models={
            "starter": load(1, 0, 5.0, 0.1, tokens=(50, 900.0, 60)),
            "ft:a": load(2, 3, 9.0, 0.4, tokens=(20, 800.0, 80), computed_part=0.5),
            "ft:b": ModelLoad(0, 1, None, None),
        },
    )
    asked = routing.demand("starter")
    assert (asked.inflight, asked.held) == (3, 4)
    assert asked.waiting_tokens == 70, "prompts that wait, not the tokens that running requests still have to write"
    assert asked.prompt_tokens == 60 + 80 / 2, "what a cache of prefixes has fills no further one"
    assert (asked.last_request_s, asked.tpot_p95_s) == (9.0, 0.4)
    assert routing.demand("unheard").requests == 0
    traffic = routing.traffic("starter")
    assert set(traffic.names) >= {"starter", "ft:a"} and "unheard" not in traffic.names
    assert traffic.prefill_tokens_per_s == 800.0


async def test_canary_has_own_row_and_row_of_model_has_its_share(routing, bus, db):
    models.insert_version(db, VersionRow("starter", "v2", "here", 10, 1.0, disk_path="/m"))
    CANARIES.put(db, CanaryRow("starter", "v2", "v1", 0.2, 7.0))
    await routing.open("r1", "starter", "v1", SOCKET)
    await routing.open("r2", "starter@v2", "v2", "/run/r2.sock")
    assert bus.table["starter"]["canary"] == {"name": "starter@v2", "share": 0.2, "since_s": 7.0}
    assert [replica["id"] for replica in bus.table["starter"]["replicas"]] == ["r1"]
    row = bus.table["starter@v2"]
    assert (row["version"], [replica["id"] for replica in row["replicas"]]) == ("v2", ["r2"])
    assert not row["canary"] and not bus.table["ft:a"]["canary"]
    CANARIES.update(db, "starter", state="rolled_back", ended_s=9.0)
    routing.refresh()
    assert not bus.table["starter"]["canary"]
    routing.close("r2")
    assert "starter@v2" not in bus.table


async def test_version_name_is_callable_while_active_or_served(routing, bus, db):
    routing.refresh()
    asleep = bus.table["starter@v1"]
    assert (asleep["replicas"], asleep["pins"]) == ([], "starter"), "woken like its model"
    await routing.open("r1", "starter", "v1", SOCKET)
    assert [replica["id"] for replica in bus.table["starter@v1"]["replicas"]] == ["r1"]
    models.insert_version(db, VersionRow("starter", "v2", "here", 10, 1.0, disk_path="/m"))
    models.activate(db, "starter", "v2")
    await routing.open("r2", "starter", "v2", "/run/r2.sock")
    served = {name: [r["id"] for r in row["replicas"]] for name, row in bus.table.items() if name.startswith("starter")}
    assert served == {"starter": ["r1", "r2"], "starter@v1": ["r1"], "starter@v2": ["r2"]}
    await routing.open("r1", "starter", "v2", SOCKET)
    assert "starter@v1" not in bus.table
    bus.reported = Report(models={"starter": ModelLoad(1, 0, 5.0, 0.1), "starter@v2": ModelLoad(2, 1, 9.0, None)})
    assert (routing.demand("starter").inflight, routing.demand("starter").held) == (3, 1)
    assert routing.host("starter@v2") == "starter"


async def test_row_of_failing_model_has_reason_and_next_try(bus, db, add_model, add_adapter):
    add_model()
    add_adapter("ft:a")
    routing = routing_of(bus, db)
    routing.trouble("starter", Failure(version="v1", reason="no memory", not_before_s=500.0))
    told = {"reason": "no memory", "next_try_s": 500.0, "hold_before_s": 10.0}
    assert bus.table["starter"]["trouble"] == told
    assert bus.table["ft:a"]["trouble"] == told, "an adapter is served by the engines of its base"
    routing.trouble("starter", Failure(version="v1", reason="no memory", not_before_s=500.0, lasting=True))
    assert bus.table["starter"]["trouble"]["hold_before_s"] == 1.0, "nobody waits long for what fails again"
    await routing.open("r1", "starter", "v1", SOCKET)
    assert not bus.table["starter"]["trouble"] and not bus.table["ft:a"]["trouble"]
    routing.close("r1")
    models.insert_version(db, VersionRow("starter", "v2", "here", 10, 1.0, disk_path="/m"))
    models.activate(db, "starter", "v2")
    routing.refresh()
    assert not bus.table["starter"]["trouble"], "another version is another chance"


async def test_rows_of_versions_and_canary_have_owners_of_model(routing, bus, db):
    """Rows of versions, checkpoints and canaries have the owners of their model; null: every owner, even future."""
    models.update(db, "ft:a", owner="alice")
    models.share(db, "ft:a", "bob")
    CANARIES.put(db, CanaryRow("ft:a", "step-1", "step-2", 0.1, 7.0))
    jobs.insert(db, JobRow("ftjob-1", "starter", "supervised", "f", 1, "ft:a", 1.0))
    models.update_version(db, "ft:a", "step-1", checkpoint="ft:a:ckpt-step-1")
    routing.refresh()
    owners = {name: row["owners"] for name, row in bus.table.items()}
    of_a = {name: told for name, told in owners.items() if name.startswith("ft:a")}
    assert set(of_a) == {"ft:a", "ft:a@step-1", "ft:a@step-2", "ft:a:ckpt-step-1"}
    assert all(told == ["alice", "bob"] for told in of_a.values())
    assert owners["starter"] is None and owners["starter@v1"] is None and owners["ft:b"] == []
    models.share(db, "ft:a", models.EVERYBODY)
    models.unshare(db, "starter", models.EVERYBODY)
    routing.refresh()
    assert bus.table["ft:a:ckpt-step-1"]["owners"] is None and bus.table["starter@v1"]["owners"] == []
