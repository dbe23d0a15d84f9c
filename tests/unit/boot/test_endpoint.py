"""The box checks that its port is free before it starts any process."""

import socket

import pytest

from appliance.boot import ray_head
from appliance.boot.main import Box, BoxError, BoxState, port_taken
from appliance.config import BoxConfig
from appliance.paths import BoxPaths


@pytest.fixture
def foreign():
    """Listen with SO_REUSEPORT, as another box's gateway does; yield the port."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


async def test_start_on_taken_port_fails_before_ray_starts(tmp_path, foreign, monkeypatch):
    paths = BoxPaths.of(tmp_path / "box", tmp_path)
    paths.create()
    settings = {"data_dir": str(paths.data_dir), "port": foreign, "start_timeout_s": 30}
    box = Box(BoxConfig.model_validate({"box": settings}), paths, BoxState(paths.state_file))

    async def no_ray():
        raise ray_head.RayStartError("Ray was started")

    monkeypatch.setattr(box, "_ray", type("NoRay", (), {"begin": staticmethod(no_ray)})())
    with pytest.raises(BoxError, match=rf"port {foreign} of '127.0.0.1'.*--port"):
        await box.start()


def test_port_taken_names_an_unusable_host_and_its_option():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    assert port_taken("127.0.0.1", port) == ""
    assert port_taken("localhost", port) == ""
    assert "--host" in port_taken("192.0.2.1", port)
    assert "nobody.invalid" in port_taken("nobody.invalid", port)
