"""The controller's parts are built in one order, and what one of them signals reaches those that must know."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from appliance.config import load_config
from appliance.controller.assembly import assemble
from appliance.controller.devices.lost_nodes import NODES
from appliance.controller.interfaces.signals import Signal
from appliance.paths import BoxPaths
from appliance.store.records import box
from appliance.store.rows import ModelRow
from scheduler.core.inventory import Device


@pytest.fixture
async def parts(tmp_path):
    config = load_config(None, {"data_dir": str(tmp_path / "data"), "devices": 2}, {})
    paths = BoxPaths.of(tmp_path / "data", shm_mount=tmp_path)
    paths.create()
    made = assemble(config, paths)
    yield made
    made.db.close()


def test_a_signal_reaches_its_handlers_in_order_with_what_it_carries():
    heard, signal = [], Signal()
    signal.connect(lambda n: heard.append(("first", n)), lambda n: heard.append(("second", n)))
    signal(3)
    assert heard == [("first", 3), ("second", 3)]


def test_what_changes_reaches_the_loop_and_the_gateways(parts):
    before = parts.loop.nudge()
    parts.signals.load_reported()
    assert parts.loop.nudge() == before + 2, "a report of load makes the next round come soon"
    published = []
    parts.context.key_sink = SimpleNamespace(keys_changed=published.append)
    parts.signals.models_changed()
    assert published == [{}], "gateways get the keys of now"
    parts.signals.keys_changed()
    assert published == [{}, {}]


@pytest.mark.parametrize(
    ("table", "scheme"), [("", "http"), ('tls_cert_path = "c.pem"\ntls_key_path = "k.pem"', "https")]
)
async def test_the_box_names_its_endpoint_by_the_scheme_that_it_speaks(tmp_path, table, scheme):
    """`appliance status` said http:// of an endpoint with TLS: who believed it sent a key in clear."""
    file = tmp_path / "appliance.toml"
    file.write_text(f"[gateway]\n{table}\n")
    paths = BoxPaths.of(tmp_path / "data", shm_mount=tmp_path)
    paths.create()
    made = assemble(load_config(file, {"data_dir": str(tmp_path / "data"), "devices": 2}, {}), paths)
    assert made.context.box["url"] == f"{scheme}://127.0.0.1:8000/v1"
    made.db.close()


def test_a_node_that_joins_is_remembered(parts):
    parts.signals.node_changed("n1", "joined", (Device("n1/0", "n1", 0),))
    assert list(box.get(parts.db, NODES, {})) == ["n1"]


def test_engines_are_sized_by_the_devices_of_now(parts):
    row = ModelRow("m", "base", "LlamaForCausalLM", 10**6, 2 * 10**6, "us", "here", 1.0)
    before = parts.context.sizes.size(row, None)
    parts.loop.box = replace(parts.loop.box, devices={"n1/0": Device("n1/0", "n1", 0, memory_bytes=2**30)})
    assert parts.context.sizes.size(row, None).room_bytes == 2**30 < before.room_bytes


def test_rows_of_usage_reach_what_counts_them(parts):
    with pytest.raises(ValueError, match="usage"):
        parts.signals.usage_reported([{"key": 1}])
