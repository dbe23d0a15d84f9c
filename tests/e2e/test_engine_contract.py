"""The pinned vLLM still has everything that serve touches inside it."""

from __future__ import annotations

from runtime.processes.child import Child


async def test_vllm_has_what_is_relied_on(engine_box):
    entry, log = "tests.e2e.vllm_contract:main", engine_box.logs / "contract.log"
    child = await Child.spawn(engine_box.warm_socket, entry, {}, log_path=log, name="contract")
    event = await child.next_event()
    await child.closed()
    assert event["event"] == "contract" and event["failures"] == [], event
