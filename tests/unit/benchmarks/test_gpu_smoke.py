"""The logic of `make gpu-smoke` on made-up machines; its measures need a GPU."""

from __future__ import annotations

import json
import subprocess

import pytest

from benchmarks.gpu import measures, smoke, verdicts
from benchmarks.gpu.verdicts import PARTS, REMEDIES, family_of, judge
from tests.devices_support.nvml import eight_h100

H100 = "NVIDIA H100 80GB HBM3"


def machine(name=H100, count=8):
    """What a healthy one measures."""
    family = family_of(name)
    each = lambda value: [value] * count  # noqa: E731
    link = family.link * 0.85e9
    return {
        "devices": {"names": each(name), "driver": 580.0, "mig": 0, "used_bytes": each(0)},
        "fork": {"forks": {"serve": True, "train": True}},
        "copies": {
            "context_bytes": each(6e8),
            "host_to_device": each(link),
            "device_to_host": each(link),
            "locked": each(link * 0.97),
            "longest_lock_s": each(0.003),
            "longest_unlock_s": each(0.002),
            "columns": each(link * 0.7),
            "unlocked": each(link * 0.8),
            "host_copy": each(link * 2),
            "right": each(True),
        },
        "together": {"host_to_device": each(link * 0.8)},
        "compute": {"memory": each(family.memory * 0.85e9), "bf16": each(family.bf16 * 0.7e12)},
        "collectives": {
            "bus": each(475e9 if family.peers else 20e9),
            "right": each(True),
            "nvlink": each(True),
        },
        "snapshots": {
            "out": each(link * 0.8),
            "back": each(link * 0.9),
            "link_out": each(link),
            "host_copy": each(link * 2),
            "link_back": each(link),
            "right": each(True),
        },
        "attention": {
            "attention": each(family.bf16 * 0.3e12),
            "over_split": each(2.0),
            "attention_error": each(0.004),
        },
        "head": {"head": each(family.bf16 * 0.5e12), "head_memory": each(1.0), "head_error": each(0.004)},
        "ranks": {
            "loss_ratio": each(0.5),
            "same": each(True),
            "residual_bytes": each(1.2e9),
            "first_step_s": each(15.0),
            "step_s": each(0.02),
        },
    }


@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize("name", [H100, "NVIDIA H200", "NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-80GB"])
def test_a_healthy_machine_passes_every_line(name, count):
    judged = judge(machine(name, count), count)
    assert [verdict for verdict in judged if verdict.state != "ok"] == []
    assert {verdict.name for verdict in judged} == set(REMEDIES)


BROKEN = [
    ("gpus seen", "devices", {"names": [H100] * 7}),
    ("cut by MIG", "devices", {"mig": 1}),
    ("serve forks with CUDA", "fork", {"forks": {"serve": False, "train": True}}),
    ("host to device", "copies", {"host_to_device": [53e9] * 7 + [20e9]}),
    ("locked over link", "copies", {"locked": [51e9] * 7 + [30e9]}),
    ("columns are right", "copies", {"right": [True] * 7 + [False]}),
    ("all links at once", "together", {"host_to_device": [10e9] * 8}),
    ("bf16 products", "compute", {"bf16": [1e14] * 8}),
    ("all-reduce", "collectives", {"bus": [475e9] * 7 + [40e9]}),
    ("all-reduce is right", "collectives", {"right": [True] * 7 + [False]}),
    ("snapshot out over limit", "snapshots", {"out": [45e9] * 7 + [12e9]}),
    ("snapshot is right", "snapshots", {"right": [True] * 7 + [False]}),
    ("attention's error", "attention", {"attention_error": [0.004] * 7 + [0.5]}),
    ("loss head's error", "head", {"head_error": [0.004] * 7 + [float("nan")]}),
    ("ranks learn", "ranks", {"loss_ratio": [1.0] * 8}),
    ("ranks agree", "ranks", {"same": [True] * 7 + [False]}),
    ("rank's residual", "ranks", {"residual_bytes": [1e9] * 7 + [3e9]}),
]


@pytest.mark.parametrize(("name", "part", "change"), BROKEN, ids=[row[0] for row in BROKEN])
def test_each_fault_fails_its_own_line_and_names_a_remedy(name, part, change):
    facts = machine()
    facts[part] |= change
    failed = [verdict for verdict in judge(facts, 8) if verdict.state == "fail"]
    assert name in [verdict.name for verdict in failed]
    line = next(verdict for verdict in failed if verdict.name == name).line()
    assert line.startswith("fail") and REMEDIES[name] in line and ("at least" in line or "at most" in line)


def test_a_longer_name_wins_and_an_unknown_gpu_fails_only_when_clearly_broken():
    assert family_of("NVIDIA A100-SXM4-80GB").peers == 228 and family_of("NVIDIA A100-PCIE-40GB").peers is None
    assert family_of("NVIDIA B9000") is verdicts.UNKNOWN


class Child:
    def __init__(self, answer, code=0, error=""):
        self.answer, self.returncode, self.error, self.killed = answer, code, error, False

    def communicate(self, timeout=None):
        if self.answer is None and not self.killed:
            raise subprocess.TimeoutExpired("measure", timeout)
        return (json.dumps(self.answer) if self.answer else ""), self.error

    def kill(self):
        self.killed = True
        self.returncode = -9


def started(asked, count=4, **special):
    """A stand-in for `smoke.start`: each part finds what a healthy machine finds, of one GPU."""
    one = {**machine(count=1), "devices": {**machine(count=count)["devices"], "numa_nodes": [None] * count}}

    def start(arguments, variables):
        part = arguments[0]
        asked.append((tuple(arguments), dict(variables)))
        if part in special:
            return special[part](arguments, variables)
        if part == "fork":
            return Child({"forks": {arguments[2]: True}})
        flat = {key: value[0] if isinstance(value, list) else value for key, value in one[part].items()}
        return Child(one[part] if part == "devices" else flat)

    return start


@pytest.mark.parametrize("count", [1, 4, 8])
def test_every_gpu_is_measured_alone_and_together(count):
    asked = []
    facts = smoke.measure(PARTS, installed=lambda _: True, start=started(asked, count))
    alone = [variables["CUDA_VISIBLE_DEVICES"] for (part, *_), variables in asked if part == "copies"]
    assert alone == [str(gpu) for gpu in range(count)]
    assert len(facts["copies"]["locked"]) == count
    if count == 1:
        assert "one GPU" in facts["together"]["skipped"] and "one GPU" in facts["collectives"]["skipped"]
    else:
        assert len(facts["together"]["host_to_device"]) == len(facts["collectives"]["bus"]) == count
        of = lambda part: [variables for (name, *_), variables in asked if name == part]  # noqa: E731
        every = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))}
        assert of("collectives") == [every] * count, "NCCL's peers are seen by each"
        assert of("ranks") == [{"CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in range(count)]
    assert all(verdict.state in ("ok", "skip") for verdict in judge(facts, count))


def test_a_part_that_hangs_or_breaks_costs_its_own_line():
    start = started(
        [],
        compute=lambda *_: Child(None),
        copies=lambda _, variables: Child({}, 1, f"out of memory on {variables['CUDA_VISIBLE_DEVICES']}"),
    )
    facts = smoke.measure(PARTS, installed=lambda _: True, start=start)
    failed = {verdict.name: verdict.remedy for verdict in judge(facts) if verdict.state == "fail"}
    assert set(failed) == {"compute", "copies"}
    assert "did not end within" in failed["compute"] and "GPU 3: out of memory on 3" in failed["copies"]


def test_gpus_cut_by_mig_are_counted_though_only_root_may_ask_who_uses_them(monkeypatch):
    machine = eight_h100().install(monkeypatch)
    machine.gpus[2].mig = machine.gpus[2].private = True
    found = measures.devices()
    assert len(found["numa_nodes"]) == 8
    assert (found["mig"], found["used_bytes"], found["driver"]) == (1, [0] * 8, 580.0)


def test_gpus_that_reach_each_other_over_pcie_are_not_taken_for_joined_by_nvlink(monkeypatch):
    machine = eight_h100().install(monkeypatch)
    assert all(measures.nvlink(gpu, 8) for gpu in range(8))
    machine.gpus[7].switched = False
    assert [measures.nvlink(gpu, 8) for gpu in (0, 7)] == [False, False] and measures.nvlink(0, 7)


def test_a_machine_without_gpus_is_told_so(monkeypatch, capsys):
    monkeypatch.setattr(smoke.Path, "exists", lambda _: False)
    assert smoke.main([]) == 2
    assert "no NVIDIA GPU here" in capsys.readouterr().err


def test_results_are_written_and_a_failure_ends_with_one(monkeypatch, tmp_path, capsys):
    facts = machine()
    monkeypatch.setattr(smoke.Path, "exists", lambda _: True)
    monkeypatch.setattr(smoke, "measure", lambda *_, **__: facts)
    assert smoke.main(["--results", str(tmp_path / "r" / "x.json"), "--gpus", "8"]) == 0
    assert json.loads((tmp_path / "r" / "x.json").read_text())["facts"]["compute"] == facts["compute"]
    facts["compute"]["bf16"] = [1.0]
    assert smoke.main(["--results", str(tmp_path / "r" / "x.json")]) == 1
    assert "1 fail" in capsys.readouterr().out
    assert smoke.result_name([H100] * 8) == "8x-nvidia-h100-80gb-hbm3"


def test_bytes_that_are_not_locked_are_held_against_the_hosts_memory_where_that_is_slower_than_the_link():
    """Of an H200 in a virtual machine: 40.8 of 55.3 GB/s, 36 that the host copies; columns at 20 were called slow."""
    facts = machine(count=1)
    facts["copies"] |= {"host_to_device": [55.3e9], "host_copy": [36e9], "unlocked": [40.8e9], "columns": [20.2e9]}
    facts["snapshots"] |= {"link_out": [55e9], "link_back": [55e9], "host_copy": [36e9], "out": [31e9], "back": [28e9]}
    states = {one.name: one.state for one in judge(facts)}
    named = ("unlocked over limit", "columns over limit", "snapshot out over limit", "snapshot in over limit")
    assert [states[name] for name in named] == ["ok"] * 4
