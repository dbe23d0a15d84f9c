"""Checks an engine's settings with vLLM's own parser and configuration, in a process forked for that.

`main` is the entry that runtime.processes.warm_parent calls in the child. It builds everything of an engine that needs
no weights, and ends: whatever vLLM refuses there would have stopped the engine at its start.
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


class ArgumentsRefused(ValueError):
    """vLLM's parser does not take them."""


def main(lifeline: Lifeline, args: dict[str, Any]) -> int:
    """`args`: `{"spec": ReplicaSpec as JSON}`. Tells {"event": "checked", "refused": text or ""}."""
    spec = ReplicaSpec(**args["spec"])
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
        AsyncEngineArgs.from_cli_args(options).create_engine_config()
        return ""
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
