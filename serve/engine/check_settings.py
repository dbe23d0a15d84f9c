"""Checks an engine's settings with vLLM's own parser and configuration, in a process forked for that.

`main` is the entry that runtime.processes.warm_parent calls in the child. It builds everything of an engine that needs
no weights, and ends: whatever vLLM refuses there would have stopped the engine at its start. What vLLM's configuration
takes and its core or workers do not is looked at here too: with such a value the model had no engine any more.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from runtime.devices.kinds import kind_of
from runtime.logs import configure_logging
from runtime.processes.lifeline import Lifeline
from runtime.pydantic_words import words_of_check
from serve.core.parsers import PARSER_TOKENS
from serve.core.spec import ReplicaSpec
from serve.engine.main import PARSER
from serve.load.version_check import read_chat_template, read_config
from serve.vllm import plugin
from serve.vllm.arguments import engine_arguments, engine_environment
from weights.checkpoint.folder import may_open
from weights.checkpoint.vocabulary import tokens_of
from weights.format.errors import WeightsError

BLOCK_STEP, BLOCK_STEP_ON_HOST = 16, 32  # get_supported_kernel_block_sizes in vllm/v1/attention/backends


class ArgumentsRefused(ValueError):
    """vLLM's parser does not take them."""


def main(lifeline: Lifeline, args: dict[str, Any]) -> int:
    """`args`: `{"spec": ReplicaSpec as JSON}`. Tells {"event": "checked", "refused": text or ""}."""
    spec = ReplicaSpec.from_json(args["spec"])
    configure_logging("settings check", replica=spec.replica_id)
    with tempfile.TemporaryDirectory(dir=Path(spec.socket_path).parent) as scratch:
        os.environ.update({**engine_environment(spec, 1), "VLLM_RPC_BASE_PATH": scratch, "TMPDIR": scratch})
        tempfile.tempdir = scratch
        lifeline.emit("checked", refused=refused(spec))
    return 0


def refused(spec: ReplicaSpec) -> str:
    """Why vLLM would not start an engine with this spec, "" if it would."""

    def raise_instead(message: str) -> NoReturn:
        raise ArgumentsRefused(message)

    PARSER.error = raise_instead
    try:
        may_open(spec.version_path, spec.model)
    except WeightsError as error:
        return str(error)
    template = read_chat_template(spec.version_path)
    plugin.register()
    try:
        tokens = tokens_of(Path(spec.version_path), PARSER_TOKENS)
        options = PARSER.parse_args(engine_arguments(spec, read_config(spec.version_path), template, tokens))
        validate_parsed_serve_args(options)
        for kind, name, known in (
            ("tool", options.tool_call_parser, ToolParserManager.list_registered),
            ("reasoning", options.reasoning_parser, ReasoningParserManager.list_registered),
        ):
            if name and name not in known():
                raise ArgumentsRefused(f"there is no {kind} parser {name}; vLLM has {', '.join(sorted(known()))}")
        config = AsyncEngineArgs.from_cli_args(options).create_engine_config()
        return refused_later(config, on_host=kind_of(spec.kind).on_host)
    except ValidationError as error:
        return in_words(error)
    except (ValueError, TypeError, KeyError, NotImplementedError, AssertionError, RuntimeError) as error:
        return str(error).strip() or type(error).__name__


def in_words(error: ValidationError) -> str:
    """What is wrong, without the names of vLLM's classes, all of its arguments and an address of pydantic's."""
    told = error.errors(include_url=False, include_context=False, include_input=False)
    names = (".".join(map(str, one["loc"])).replace("_", "-") for one in told)
    messages = (words_of_check(one["msg"]) for one in told)
    return "; ".join(": ".join(filter(None, pair)) for pair in zip(names, messages, strict=True))


def refused_later(config: Any, *, on_host: bool) -> str:
    """Why an engine with this VllmConfig would not start, or would end at its first prompt; "" if it would do."""
    model, cache = config.model_config, config.cache_config
    # vLLM itself sets it for latent attention.
    step = BLOCK_STEP_ON_HOST if on_host and not model.use_mla else BLOCK_STEP
    if cache.user_specified_block_size and cache.block_size % step:
        return f"no kernel computes blocks of {cache.block_size} tokens: block-size has to be a multiple of {step}"
    # Of a checkpoint that has it, the look at the checkpoint has said whether engines here compute it.
    of_checkpoint = getattr(model.hf_config, "quantization_config", None)
    if on_host and "fp8" in (model.quantization or "") and not of_checkpoint:
        return f"engines on this kind of device compute no layers in {model.quantization}"
    return ""
