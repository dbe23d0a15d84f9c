"""A node that joins, before Ray is started."""

import fcntl
import shutil

from appliance import node
from appliance.config import load_config
from appliance.paths import BoxPaths


def test_a_data_directory_in_use_is_refused_and_left_alone(tmp_path, monkeypatch, capfd):
    """Joining takes leftovers of its data directory down: those of a box that runs there would be the box."""
    monkeypatch.chdir(tmp_path)
    config = load_config(None, {"data_dir": str(tmp_path / "box"), "devices": 1, "node_address": "127.0.0.1"})
    paths = BoxPaths.of(tmp_path / "box")
    paths.create()
    other = tmp_path / "ray.token"
    other.write_text("of another box")
    before = paths.ray_token.read_text()
    try:
        with open(paths.lock_file, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            code = node.main(
                ["--config-json", config.model_dump_json(), "--head", "127.0.0.1:1", "--token-path", str(other),
                 "--name", "n1"]
            )  # fmt: skip
        assert code == 5 and "--data-dir" in capfd.readouterr().err
        assert paths.ray_token.read_text() == before
    finally:
        shutil.rmtree(paths.shm_root)
