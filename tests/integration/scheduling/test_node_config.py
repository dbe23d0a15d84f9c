"""Environment of the warm parents for each kind of device."""

from pathlib import Path

from appliance.config import BoxConfig
from appliance.node_config import device_environment, node_config_of
from appliance.paths import BoxPaths
from scheduler.core.workload import Device
from scheduler.devices.discovery import logical_devices


def test_device_environment_puts_kernel_caches_in_box_folder(tmp_path):
    env = device_environment("cuda", tmp_path / "cache")
    kept = {name: value for name, value in env.items() if value.startswith("/")}
    assert kept.keys() >= {"VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"}
    assert kept.keys() >= {"FLASHINFER_WORKSPACE_BASE", "HUMMING_CACHE_DIR", "HUMMING_TMP_DIR"}
    assert all(Path(value).is_relative_to(tmp_path / "cache") for value in kept.values())


def test_node_config_sets_environment_of_both_warm_parents(tmp_path):
    paths = BoxPaths.of(tmp_path / "data", tmp_path)
    paths.shm_root.mkdir()
    gpus = (Device("n0/0", "n0", 0, "cuda"),)
    for devices, kind in ((gpus, "cuda"), (logical_devices(2), "cpu")):
        node_config = node_config_of(BoxConfig(), paths, devices)
        assert [dict(spec.env)["DS_ACCELERATOR"] for spec in node_config.warm] == [kind, kind]
        assert all("GLIBC_TUNABLES" in dict(spec.env) for spec in node_config.warm)


def test_node_config_binds_numa_nodes_unless_disabled(tmp_path):
    paths = BoxPaths.of(tmp_path / "data", tmp_path)
    paths.shm_root.mkdir()
    gpus = tuple(Device(f"n0/{i}", "n0", i, "cuda", numa_node=i // 4) for i in (0, 4))
    assert node_config_of(BoxConfig(), paths, gpus).numa_nodes(gpus) == (0, 1)
    free = BoxConfig.model_validate({"box": {"numa_bind": False}})
    assert node_config_of(free, paths, gpus).numa_nodes(gpus) == (None, None)
    logical = logical_devices(1)
    assert node_config_of(BoxConfig(), paths, logical).numa_nodes(logical) == (None,)
