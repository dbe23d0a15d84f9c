"""The pinned vLLM still has everything that serve touches inside it."""

from __future__ import annotations

from importlib.metadata import entry_points

from runtime.processes.child import Child


async def test_vllm_has_what_is_relied_on(engine_box):
    assert await failures(engine_box) == []


async def failures(engine_box) -> list[str]:
    child = await Child.spawn(
        engine_box.warm_socket,
        "tests.e2e.vllm_contract:main",
        {},
        log_path=engine_box.logs / "contract.log",
        name="c",
    )
    event = await child.next_event()
    await child.closed()
    assert event["event"] == "contract", event
    return event["failures"]


def test_the_plugin_entry_point_resolves():
    for entry in entry_points(group="vllm.general_plugins"):
        assert entry.name != "appliance_shm" or entry.value == "serve.vllm.plugin:register"
