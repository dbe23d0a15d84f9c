"""How one model's engines are set up, and which of vLLM's arguments nobody may set."""

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import ValidationError
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from serve.core.config import EngineConfig
from serve.core.model_settings import ELSEWHERE, ENGINE_ARGUMENTS, ModelSettings, in_fewer_bits, with_system_prompt
from serve.core.parsers import CALL_SYNTAX, NEEDED_TOKENS, TOOL_PARSERS
from serve.core.spec import ReplicaSpec
from serve.vllm.arguments import engine_arguments

TEMPLATE = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{# tools #}"
# vLLM 0.32's arguments that open a file, a socket, a host, code, keys or logs to whoever may set them.
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


def spec(**settings):
    return ReplicaSpec(
        replica_id="r0",
        model="m",
        version="v1",
        version_path="/v",
        socket_path="/r0.sock",
        devices=(0,),
        kind="cpu",
        shm_root="/shm",
        kv_cache_bytes=2**20,
        **ModelSettings.model_validate(settings).spec_fields(),
    )


def arguments(**settings):
    return engine_arguments(spec(**settings), {"model_type": "qwen2"}, "<tool_call>" + TEMPLATE)


@pytest.mark.parametrize("name", HOLES)
def test_an_argument_that_opens_something_is_refused_by_name(name):
    for spelled in (name, f"--{name}", name.replace("-", "_"), f"-{name}", name.upper(), f"{name}.x", f" {name}"):
        with pytest.raises(ValidationError, match="may not be set for a model|is set by"):
            ModelSettings(engine_args={spelled: "x"})


def test_a_value_cannot_become_an_argument():
    args = arguments(engine_args={"block_size": "32 --api-key=x", "enforce-eager": "true", "enable-dbo": "false"})
    assert args[-3:] == ["--block-size=32 --api-key=x", "--enforce-eager", "--no-enable-dbo"]
    for bad in ("a\nb", "x" * 2001, "\x00"):
        with pytest.raises(ValidationError, match="printable"):
            ModelSettings(engine_args={"block-size": bad})
    with pytest.raises(ValidationError, match="may not be set"):
        ModelSettings(engine_args={"block-size=1 --api-key": "x"})
    assert not ENGINE_ARGUMENTS & set(ELSEWHERE)


def test_a_chat_template_is_a_text_and_never_the_name_of_a_file():
    """vLLM opens a template that names one."""
    for path in ("/etc/passwd", "../first-key", "template.jinja"):
        with pytest.raises(ValidationError, match="is not a Jinja template"):
            ModelSettings(chat_template=path)


def test_a_parser_is_set_by_any_name_that_vllm_has_for_one():
    for name in ToolParserManager.list_registered():
        assert ModelSettings(tool_parser=name).tool_parser == name
    for name in ReasoningParserManager.list_registered():
        assert ModelSettings(reasoning_parser=name).reasoning_parser == name
    with pytest.raises(ValidationError):
        ModelSettings(tool_parser="--api-key")


def test_settings_become_arguments():
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
    assert arguments(tool_parser="mistral").count("--tool-call-parser") == 1
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
def test_only_settings_that_keep_fewer_bits_leave_a_versions_token_unchecked(settings, fewer):
    assert in_fewer_bits(ModelSettings(**settings).spec_fields()["extra_args"]) == fewer


def test_equal_settings_have_one_name_and_none_has_none():
    assert ModelSettings().digest == "" == ModelSettings(engine_args={}).digest
    one, same = ModelSettings(engine_args={"block_size": "32"}), ModelSettings(engine_args={"--block-size": "32"})
    assert one.digest == same.digest != ModelSettings(engine_args={"block-size": "64"}).digest
    assert ModelSettings.model_validate(one.as_json()) == one
    box = EngineConfig(max_num_seqs=64, max_model_len=100)
    assert ModelSettings(max_num_seqs=4).config(box) == EngineConfig(max_num_seqs=4, max_model_len=100)
    assert ModelSettings(engine_args={"max-num-batched-tokens": "512"}).batched_tokens == 512


def test_a_system_prompt_stands_where_a_conversation_brings_none():
    said = "Say 'hi'\n\\ {{ no }} {% x %} \u00e9\U0001f600"
    template = ImmutableSandboxedEnvironment(trim_blocks=True).from_string(with_system_prompt(TEMPLATE, said))
    user = {"role": "user", "content": "q"}
    assert template.render(messages=[user]) == f"[system:{said}][user:q]"
    assert template.render(messages=[{"role": "system", "content": "own"}, user]) == "[system:own][user:q]"
    assert with_system_prompt(None, said) is None and with_system_prompt(TEMPLATE, "") == TEMPLATE


@pytest.mark.parametrize("name", sorted({*TOOL_PARSERS.values(), *(name for _, name in CALL_SYNTAX)}))
def test_needed_tokens_are_those_without_which_vllm_refuses_a_tokenizer(name):
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
