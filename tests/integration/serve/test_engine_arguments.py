"""Arguments and environment of a model's engines, and vLLM arguments that may not be set."""

from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import ValidationError
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from serve.core.config import EngineConfig
from serve.core.model_settings import ELSEWHERE, ENGINE_ARGUMENTS, ModelSettings, in_fewer_bits, with_system_prompt
from serve.core.parsers import (
    CALL_SYNTAX,
    NEEDED_TOKENS,
    PARSER_TOKENS,
    TOOL_PARSERS,
    missing_tokens,
    reasoning_parser,
    tool_parser,
)
from serve.core.spec import ReplicaSpec, remove_segments_below, remove_segments_of, segment_prefix_of
from serve.vllm.arguments import EXECUTOR, GPU_WORKER, engine_arguments, engine_environment
from tests.unit.serve.specs import spec


def test_remove_segments_below_finds_killed_engines(tmp_path, monkeypatch):
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


def test_gpu_arguments_enable_sleep_and_own_devices():
    cuda = spec(kind="cuda", devices=[2, 5], tensor_parallel=2)
    args = engine_arguments(cuda, {}, None)
    assert "--enable-sleep-mode" in args and "--enforce-eager" not in args
    assert args[args.index("--worker-cls") + 1] == GPU_WORKER
    assert pairs(args)["--distributed-executor-backend"] == EXECUTOR
    env = engine_environment(cuda, 64)
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]) == ("2,5", "PCI_BUS_ID")
    assert env["NCCL_SOCKET_IFNAME"] == env["GLOO_SOCKET_IFNAME"] == "lo"


def test_environment_disables_dev_mode_and_bounds_n():
    env = engine_environment(spec(), 64)
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
def test_tool_parser_prefers_template_over_family(family, template, parser):
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
def test_tool_parser_without_needed_token_is_none(family, template, parser):
    needed = NEEDED_TOKENS[parser]
    assert tool_parser(family, template, needed) == parser and not missing_tokens(parser, needed)
    assert tool_parser(family, template, needed[1:]) is None
    assert missing_tokens(parser, needed[1:]) == needed[:1]
    config = {"model_type": family}
    assert pairs(engine_arguments(spec(), config, template, needed))["--tool-call-parser"] == parser
    assert "--tool-call-parser" not in engine_arguments(spec(), config, template, needed[1:])


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
def test_reasoning_parser_follows_generation_prompt_and_family(family, template, parser):
    """A reasoning parser for a model that does not reason would treat its whole answer as reasoning."""
    assert reasoning_parser(family, template) == parser
    args = engine_arguments(spec(), {"model_type": family}, template)
    assert ("--reasoning-parser" in args) is (parser is not None)
    if parser:
        assert args[args.index("--reasoning-parser") + 1] == parser
    told = spec(reasoning_parser="none")
    assert "--reasoning-parser" not in engine_arguments(told, {"model_type": family}, template)


def test_adapter_arguments_cover_slots_and_linear_layers():
    order = spec(adapter_slots=2, adapter_max_rank=20, adapters_resident=8, adapter_roots=["/a", "/b"])
    assert ReplicaSpec(**order.to_json()) == order and order.adapter_roots == ("/a", "/b")
    args = engine_arguments(order, {}, None)
    given = pairs(args)
    assert (given["--max-loras"], given["--max-lora-rank"], given["--max-cpu-loras"]) == ("2", "32", "8")
    assert "--enable-lora" in args and "lm_head" not in args
    assert engine_environment(order, 64)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "--enable-lora" not in engine_arguments(spec(), {}, None)


def test_template_without_tools_gets_hermes_tools_and_parser():
    args = pairs(engine_arguments(spec(), {"model_type": "llama"}, "{{ messages }}"))
    assert args["--tool-call-parser"] == "hermes" and args["--chat-template"].endswith("{{ messages }}")
    known = pairs(engine_arguments(spec(), {"model_type": "llama"}, "{{ tools }}", PARSER_TOKENS))
    assert known["--tool-call-parser"] == "llama3_json" and "--chat-template" not in known


TEMPLATE = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{# tools #}"
# vLLM 0.32's arguments that give access to files, sockets, hosts, code, keys or logs.
HOLES = (
    "api-key", "allowed-origins", "allow-credentials", "chat-template", "code-revision", "collect-detailed-traces",
    "config", "config-format", "data-parallel-address", "data-parallel-backend", "disable-log-requests",
    "distributed-executor-backend", "download-dir", "ec-transfer-config", "enable-log-requests", "enable-lora",
    "enable-sleep-mode", "generation-config", "hf-config-path", "hf-overrides", "hf-token", "host",
    "kv-events-config", "kv-transfer-config", "load-format", "logits-processors", "lora-modules", "master-addr",
    "middleware", "model", "model-impl", "model-loader-extra-config", "otlp-traces-endpoint",
    "io-processor-plugin", "port",
    "reasoning-parser-plugin", "revision", "root-path", "scheduler-cls", "served-model-name",
    "speculative-config", "ssl-keyfile", "tokenizer", "tool-parser-plugin", "tool-server", "trust-remote-code",
    "trust-request-chat-template", "uds", "weight-transfer-config", "worker-cls", "worker-extension-cls",
    "allowed-local-media-path", "allowed-media-domains", "enable-prompt-embeds", "logprobs-mode", "max-logprobs",
)  # fmt: skip


def arguments(**settings):
    configured = spec(**ModelSettings.model_validate(settings).spec_fields())
    return engine_arguments(configured, {"model_type": "qwen2"}, "<tool_call>" + TEMPLATE)


@pytest.mark.parametrize("name", HOLES)
def test_engine_args_unlisted_argument_is_refused(name):
    for spelled in (name, f"--{name}", name.replace("-", "_"), f"-{name}", name.upper(), f"{name}.x", f" {name}"):
        with pytest.raises(ValidationError, match="may not be set for a model|is set by"):
            ModelSettings(engine_args={spelled: "x"})


def test_engine_args_value_cannot_inject_argument():
    args = arguments(engine_args={"block_size": "32 --api-key=x", "enforce-eager": "true", "enable-dbo": "false"})
    assert args[-3:] == ["--block-size=32 --api-key=x", "--enforce-eager", "--no-enable-dbo"]
    for bad in ("a\nb", "x" * 2001, "\x00"):
        with pytest.raises(ValidationError, match="printable"):
            ModelSettings(engine_args={"block-size": bad})
    with pytest.raises(ValidationError, match="may not be set"):
        ModelSettings(engine_args={"block-size=1 --api-key": "x"})
    assert not ENGINE_ARGUMENTS & set(ELSEWHERE)


def test_chat_template_refuses_file_paths():
    """vLLM would open the file that such a template names."""
    for path in ("/etc/passwd", "../first-key", "template.jinja"):
        with pytest.raises(ValidationError, match="is not a Jinja template"):
            ModelSettings(chat_template=path)


def test_parser_settings_accept_all_vllm_names():
    for name in ToolParserManager.list_registered():
        assert ModelSettings(tool_parser=name).tool_parser == name
    for name in ReasoningParserManager.list_registered():
        assert ModelSettings(reasoning_parser=name).reasoning_parser == name
    with pytest.raises(ValidationError):
        ModelSettings(tool_parser="--api-key")


def test_model_settings_become_engine_arguments():
    args = arguments(
        kv_cache_dtype="fp8",
        reasoning_parser="qwen3",
        sampling={"temperature": 0.2, "max_tokens": 9},
        draft_tokens=3,
        system_prompt="Be brief.",
    )
    assert "--kv-cache-dtype=fp8" in args and args[args.index("--reasoning-parser") + 1] == "qwen3"
    assert '--override-generation-config={"temperature": 0.2, "max_new_tokens": 9}' in args
    assert any(arg.startswith('--speculative-config={"method": "ngram", "num_speculative_tokens": 3') for arg in args)
    assert "Be brief." in args[args.index("--chat-template") + 1]
    assert args[args.index("--tool-call-parser") + 1] == "hermes"
    named = arguments(tool_parser="mistral")
    assert named.count("--tool-call-parser") == 1 and pairs(named)["--tool-call-parser"] == "mistral"
    assert "--tool-call-parser" not in arguments(tool_parser="none")
    thinks = {"chat_template": "{{ messages }}{% if add_generation_prompt %}<think>{% endif %}"}
    assert arguments(**thinks).count("--reasoning-parser") == 1
    assert not [arg for arg in arguments(**thinks, reasoning_parser="none") if arg.startswith("--reasoning-parser")]
    assert arguments() == [arg for arg in arguments() if "template" not in arg]


@pytest.mark.parametrize(
    ("settings", "fewer"),
    [
        ({"engine_args": {"quantization": "fp8"}}, True),
        ({"kv_cache_dtype": "fp8"}, True),
        ({"engine_args": {"mamba-cache-dtype": "float16"}}, True),
        ({"engine_args": {"enforce-eager": "true", "attention-backend": "FLASH_ATTN"}, "draft_tokens": 3}, False),
    ],
)
def test_in_fewer_bits_detects_lower_precision_settings(settings, fewer):
    assert in_fewer_bits(ModelSettings(**settings).spec_fields()["extra_args"]) == fewer


def test_digest_equal_settings_have_equal_digest():
    assert ModelSettings().digest == "" == ModelSettings(engine_args={}).digest
    one, same = ModelSettings(engine_args={"block_size": "32"}), ModelSettings(engine_args={"--block-size": "32"})
    assert one.digest == same.digest != ModelSettings(engine_args={"block-size": "64"}).digest
    assert ModelSettings.model_validate(one.as_json()) == one
    box = EngineConfig(max_num_seqs=64, max_model_len=100)
    assert ModelSettings(max_num_seqs=4).config(box) == EngineConfig(max_num_seqs=4, max_model_len=100)
    assert ModelSettings(engine_args={"max-num-batched-tokens": "512"}).batched_tokens == 512


def test_system_prompt_applies_without_system_message():
    said = "Say 'hi'\n\\ {{ no }} {% x %} \u00e9\U0001f600"
    template = ImmutableSandboxedEnvironment(trim_blocks=True).from_string(with_system_prompt(TEMPLATE, said))
    user = {"role": "user", "content": "q"}
    assert template.render(messages=[user]) == f"[system:{said}][user:q]"
    assert template.render(messages=[{"role": "system", "content": "own"}, user]) == "[system:own][user:q]"
    assert with_system_prompt(None, said) is None and with_system_prompt(TEMPLATE, "") == TEMPLATE


@pytest.mark.parametrize("name", sorted({*TOOL_PARSERS.values(), *(name for _, name in CALL_SYNTAX)}))
def test_needed_tokens_match_vllm_parsers(name):
    parser = ToolParserManager.get_tool_parser(name)
    needed = NEEDED_TOKENS.get(name, ())
    parser(_Tokenizer(needed))
    for token in needed:
        with pytest.raises(RuntimeError):
            parser(_Tokenizer([other for other in needed if other != token]))


class _Tokenizer:
    def __init__(self, tokens):
        self.vocab = {token: number for number, token in enumerate(tokens)}

    def get_vocab(self):
        return self.vocab

    def encode(self, text, **kwargs):
        return []
