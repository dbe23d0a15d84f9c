from __future__ import annotations

from pathlib import Path

import pytest

from serve.core.parsers import NEEDED_TOKENS, PARSER_TOKENS, missing_tokens, reasoning_parser, tool_parser
from serve.core.spec import ReplicaSpec, remove_segments_below, remove_segments_of, segment_prefix_of
from serve.vllm.arguments import EXECUTOR, GPU_WORKER, engine_arguments, engine_environment

GOOD = {
    "replica_id": "r1",
    "model": "ft:starter:acme/x:1",
    "version": "v3",
    "version_path": "/dev/shm/appliance-1/versions/starter/v3",
    "socket_path": "/dev/shm/appliance-1/run/r/r1.sock",
    "devices": [3],
    "kind": "cpu",
    "shm_root": "/dev/shm/appliance-1",
    "kv_cache_bytes": 1 << 20,
}


def test_segments_of_killed_engines_are_found_by_the_folder_of_their_sockets(tmp_path, monkeypatch):
    monkeypatch.setattr("serve.core.spec.SEGMENTS", tmp_path)
    mine, second, others = (f"/dev/shm/{name}.sock" for name in ("box/r/a", "box/r/b", "other/r/a"))
    for socket_path in (mine, second, others):
        (tmp_path / f"{segment_prefix_of(socket_path)}1f").touch()
    remove_segments_of(mine)
    assert len(list(tmp_path.iterdir())) == 2
    remove_segments_below(Path("/dev/shm/box/r"))
    assert [path.name for path in tmp_path.iterdir()] == [f"{segment_prefix_of(others)}1f"]


def pairs(args):
    return {flag: value for flag, value in zip(args, args[1:], strict=False) if flag.startswith("--")}


def test_a_gpu_engine_sleeps_by_vllms_own_mode_and_sees_only_its_devices():
    spec = ReplicaSpec(**{**GOOD, "kind": "cuda", "devices": [2, 5], "tensor_parallel": 2})
    args = engine_arguments(spec, {}, None)
    assert "--enable-sleep-mode" in args and "--enforce-eager" not in args
    assert args[args.index("--worker-cls") + 1] == GPU_WORKER
    assert pairs(args)["--distributed-executor-backend"] == EXECUTOR
    env = engine_environment(spec, 64)
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]) == ("2,5", "PCI_BUS_ID")
    assert env["NCCL_SOCKET_IFNAME"] == env["GLOO_SOCKET_IFNAME"] == "lo"


def test_dev_mode_stays_off_and_n_is_bounded():
    env = engine_environment(ReplicaSpec(**GOOD), 64)
    assert (env["VLLM_SERVER_DEV_MODE"], env["VLLM_MAX_N_SEQUENCES"]) == ("0", "64")
    assert env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "0"
    assert env["VLLM_RPC_BASE_PATH"].startswith("/dev/shm/appliance-1/run/")


@pytest.mark.parametrize(
    ("family", "template", "parser"),
    [
        ("llama", "{% if tools %}...", "llama3_json"),
        ("llama", "{{ messages }}", None),
        ("llama", "{% if tools %}<tool_call>", "hermes"),
        ("mistral", "[TOOL_CALLS] {{ tools }}", "mistral"),
        ("qwen3_5", "{% if tools %}<tool_call>\n<function=", "qwen3_coder"),
        ("llama", "<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("qwen3", "{{ tools }}", "hermes"),
        ("unheard_of", "{{ tools }}", None),
        ("llama", None, None),
    ],
)
def test_tool_parser_follows_the_template_then_the_family(family, template, parser):
    assert tool_parser(family, template, PARSER_TOKENS) == parser


@pytest.mark.parametrize(
    ("family", "template", "parser"),
    [
        ("llama", "{{ tools }}", "llama3_json"),
        ("mistral", "{{ tools }}", "mistral"),
        ("llama", "[TOOL_CALLS]{{ tools }}", "mistral"),
        ("llama", "<｜tool▁calls▁begin｜>{{ tools }}", "deepseek_v3"),
        ("unheard_of", "<|tool_call_start|>{{ tools }}", "lfm2"),
        ("jamba", "{{ tools }}", "jamba"),
    ],
)
def test_tool_parser_without_a_token_that_it_needs_is_not_chosen(family, template, parser):
    needed = NEEDED_TOKENS[parser]
    assert tool_parser(family, template, needed) == parser and not missing_tokens(parser, needed)
    assert tool_parser(family, template, needed[1:]) is None
    assert missing_tokens(parser, needed[1:]) == needed[:1]
    spec, config = ReplicaSpec(**GOOD), {"model_type": family}
    assert pairs(engine_arguments(spec, config, template, needed))["--tool-call-parser"] == parser
    assert "--tool-call-parser" not in engine_arguments(spec, config, template, needed[1:])


def test_engine_arguments_keep_a_parser_that_the_settings_name():
    named = {"tool_parser": "mistral"}
    args = engine_arguments(ReplicaSpec(**{**GOOD, **named}), {"model_type": "llama"}, "{{ tools }}")
    assert args[-2:] == ["--tool-call-parser", "mistral"]


OPENS = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
MAY_CLOSE = (
    "{% if add_generation_prompt %}assistant{% if not enable_thinking %}<think>\n\n</think>{% endif %}{% endif %}"
)
STRIPS_OLDER = (
    "{{ content.split('</think>')[-1] }}<think>{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)


@pytest.mark.parametrize(
    ("family", "template", "parser"),
    [
        ("qwen3", MAY_CLOSE, "thought"),
        ("qwen2", OPENS, "begun_thought"),
        ("llama", OPENS, "begun_thought"),
        ("unheard_of", OPENS, "begun_thought"),
        ("qwen3", STRIPS_OLDER, "thought"),
        ("qwen3", "{% if add_generation_prompt %}assistant{% endif %}", None),
        ("gpt_oss", "<|channel|>analysis", "openai_gptoss"),
        ("granite", "Here is my thought process", "granite"),
        ("granite", "{{ messages }}", None),
        ("seed_oss", "<seed:think>", "seed_oss"),
        ("qwen3", None, None),
    ],
)
def test_reasoning_parser_follows_what_stands_where_the_answer_begins(family, template, parser):
    """A parser for a model that does not reason takes its whole answer for reasoning."""
    assert reasoning_parser(family, template) == parser
    args = engine_arguments(ReplicaSpec(**GOOD), {"model_type": family}, template)
    assert ("--reasoning-parser" in args) is (parser is not None)
    if parser:
        assert args[args.index("--reasoning-parser") + 1] == parser
    told = ReplicaSpec(**{**GOOD, "reasoning_parser": "none"})
    assert "--reasoning-parser" not in engine_arguments(told, {"model_type": family}, template)


def test_adapters_of_one_batch_stay_loaded_and_only_linear_layers_take_them():
    adapters = {"adapter_slots": 2, "adapter_max_rank": 20, "adapters_resident": 8, "adapter_roots": ["/a", "/b"]}
    spec = ReplicaSpec(**{**GOOD, **adapters})
    assert ReplicaSpec(**spec.to_json()) == spec and spec.adapter_roots == ("/a", "/b")
    args = engine_arguments(spec, {}, None)
    given = pairs(args)
    assert (given["--max-loras"], given["--max-lora-rank"], given["--max-cpu-loras"]) == ("2", "32", "8")
    assert "--enable-lora" in args and "lm_head" not in args
    assert engine_environment(spec, 64)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "--enable-lora" not in engine_arguments(ReplicaSpec(**GOOD), {}, None)


def test_a_template_without_tools_gets_a_way_to_show_them_and_its_parser():
    args = pairs(engine_arguments(ReplicaSpec(**GOOD), {"model_type": "llama"}, "{{ messages }}"))
    assert args["--tool-call-parser"] == "hermes" and args["--chat-template"].endswith("{{ messages }}")
    known = pairs(engine_arguments(ReplicaSpec(**GOOD), {"model_type": "llama"}, "{{ tools }}", PARSER_TOKENS))
    assert known["--tool-call-parser"] == "llama3_json" and "--chat-template" not in known
