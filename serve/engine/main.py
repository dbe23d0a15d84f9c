"""Runs the forked engine process: vLLM's own OpenAI server on a Unix socket, controlled over the lifeline.

runtime.processes.warm_parent calls `main` in the forked child. It builds vLLM's engine and FastAPI
application from vLLM's own command line, loads the version from shared memory, checks its fingerprint, and serves.
Swap, sleep and wake arrive over the lifeline (serve.engine.control): vLLM's own routes for these stay disabled, because
they do not lease, check and name versions. `check_settings` runs in its own process and reports settings that vLLM
refuses: it builds the parts of an engine that need no weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

import torch
import uvicorn
import uvloop
from pydantic import ValidationError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import NoSignalServer
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.exceptions import EngineDeadError

from runtime.errors import ChannelClosed, words_of_check
from runtime.logs import configure_logging
from runtime.network import private_socket, serve_machines
from runtime.processes.lifeline import Lifeline
from serve.core.errors import EngineFailed, ServeError, VersionBroken, WrongState
from serve.core.parsers import PARSER_TOKENS
from serve.core.spec import ReplicaSpec, segment_prefix_of
from serve.engine.control import EngineControl
from serve.load.version_check import read_chat_template, read_config
from serve.vllm import answers, deaths, patches, plugin
from serve.vllm.arguments import engine_arguments, engine_environment
from serve.vllm.frontend import Frontend, Metrics, end_turns_of
from serve.vllm.worker import ShmWorker
from weights.checkpoint.folder import tokens_of
from weights.format.errors import WeightsError

# Building vLLM's parser inspects every config class, so the warm parent builds it once and each fork inherits it.
PARSER = make_arg_parser(FlexibleArgumentParser(description="engine"))
DEAD_ENGINE_POLL_S = 0.2


def main(lifeline: Lifeline, args: dict[str, Any]) -> int:
    """Serve until `stop` or until the engine dies. `args`: `{"spec": ReplicaSpec as JSON, "limits": {...}}`."""
    started_s = time.perf_counter()
    spec, limits = ReplicaSpec(**args["spec"]), args["limits"]
    configure_logging("engine", replica=spec.replica_id)
    _enter(spec, int(limits["max_sequences_per_request"]))
    torch.set_num_threads(spec.threads_per_worker)
    options = _options(spec)
    ShmWorker.numa_nodes, ShmWorker.segment_prefix = spec.numa_nodes, segment_prefix_of(spec.socket_path)
    patches.apply(spec.kind, eager=options.enforce_eager, segment_prefix=ShmWorker.segment_prefix)
    deaths.watch()
    plugin.register()
    return uvloop.run(_serve(lifeline, spec, options, limits, started_s))


def check_settings(lifeline: Lifeline, args: dict[str, Any]) -> int:
    """Report why vLLM would not start an engine. `args`: as for `main`. Event "checked": {"refused": text, or ""}."""
    spec = ReplicaSpec(**args["spec"])
    configure_logging("settings check", replica=spec.replica_id)
    _enter(spec, 1)
    try:
        refusal = _refusal(spec)
    finally:
        shutil.rmtree(spec.scratch_path)
    lifeline.emit("checked", refused=refusal)
    return 0


def _enter(spec: ReplicaSpec, max_sequences_per_request: int) -> None:
    """Prepare this process for vLLM."""
    os.environ.update(engine_environment(spec, max_sequences_per_request))
    Path(spec.scratch_path).mkdir(mode=0o700, exist_ok=True)
    tempfile.tempdir = spec.scratch_path  # tempfile has cached the warm parent's temporary folder


def _options(spec: ReplicaSpec) -> Namespace:
    tokens = tokens_of(Path(spec.version_path), PARSER_TOKENS)
    config, template = read_config(spec.version_path), read_chat_template(spec.version_path)
    options = PARSER.parse_args(engine_arguments(spec, config, template, tokens))
    validate_parsed_serve_args(options)
    return options


def _refusal(spec: ReplicaSpec) -> str:
    def raise_instead(message: str) -> NoReturn:
        raise ValueError(message)

    PARSER.error = raise_instead
    plugin.register()
    try:
        options = _options(spec)
        for kind, name, parsers in (
            ("tool", options.tool_call_parser, ToolParserManager),
            ("reasoning", options.reasoning_parser, ReasoningParserManager),
        ):
            if name and name not in (known := parsers.list_registered()):
                raise ValueError(f"unknown {kind} parser {name}; vLLM has {', '.join(sorted(known))}")
        AsyncEngineArgs.from_cli_args(options).create_engine_config()
        return ""
    except ValidationError as error:
        return in_words(error)
    except (ValueError, TypeError, KeyError, NotImplementedError, AssertionError, RuntimeError, WeightsError) as error:
        return str(error).strip() or type(error).__name__


def in_words(error: ValidationError) -> str:
    """Fields and messages of a validation error, without vLLM's class names and arguments or pydantic's URL."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    names = (".".join(map(str, detail["loc"])).replace("_", "-") for detail in errors)
    messages = (words_of_check(detail["msg"]) for detail in errors)
    return "; ".join(": ".join(filter(None, pair)) for pair in zip(names, messages, strict=True))


@contextlib.asynccontextmanager
async def _engine(arguments: AsyncEngineArgs) -> AsyncIterator[Frontend]:
    """As vLLM's build_async_engine_client_from_engine_args, with our classes. Raises the error that ended the core."""
    context = UsageContext.OPENAI_API_SERVER
    config = arguments.create_engine_config(usage_context=context)
    # vLLM sets "spawn" on the CPU: each process would import everything again (12 s). This process was forked from a
    # parent without threads or CUDA, so forking again is safe.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    try:
        llm = Frontend.from_vllm_config(config, usage_context=context, stat_loggers=[Metrics])
    except RuntimeError as error:
        if "Engine core initialization failed" not in str(error):
            raise
        raise deaths.cause(deaths.core_of_failed_start(error)) from error
    try:
        await llm.reset_mm_cache()  # drops what vLLM's warm-up request cached
        yield llm
    finally:
        llm.shutdown(timeout=config.shutdown_timeout)


async def _while_alive(doing: Coroutine[Any, Any, Any], dead: asyncio.Future[None], name: str) -> Any:
    """Return the result of `doing`. Raises EngineFailed if `dead` is done first: a dead core never answers a call."""
    task = asyncio.ensure_future(doing)
    try:
        await asyncio.wait({task, dead}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise EngineFailed(f"{name}: the engine's core died")
    finally:
        task.cancel()


def _cause(llm: Frontend) -> ServeError:
    return deaths.cause(llm.engine_core.resources.engine_manager.processes[0])


async def _serve(
    lifeline: Lifeline, spec: ReplicaSpec, options: Namespace, limits: dict[str, Any], started_s: float
) -> int:
    async with _engine(AsyncEngineArgs.from_cli_args(options)) as llm:
        if spec.chat_template:
            end_turns_of(llm, spec.chat_template)
        tasks = await llm.get_supported_tasks()
        app = build_app(options, tasks, llm.model_config)
        await init_app_state(llm, app.state, options, tasks)
        answers.set_up(app)
        control = EngineControl(llm, app.state, spec, limits, os.getpgid(0))
        dead = asyncio.create_task(_until_dead(llm))
        try:
            fingerprint = await _while_alive(control.started(), dead, "start")
        except VersionBroken:
            raise
        except (EngineFailed, EngineDeadError) as error:
            raise _cause(llm) from error
        listener = _listen(spec.socket_path)
        config = uvicorn.Config(
            answers.Answers(app, lambda: control.version),
            log_config=None,
            log_level="warning",
            access_log=False,
            http="httptools",
            loop="none",
            timeout_keep_alive=3600,
            timeout_graceful_shutdown=1,  # time for streams to receive vLLM's error event after the core died
        )
        # vLLM reads `server` to answer after its core has died. Without the attribute vLLM answers with an
        # AttributeError, which the gateway treats as the request's fault and does not retry.
        server = app.state.server = NoSignalServer(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            if serving.done():
                raise EngineFailed("the engine's HTTP server did not start") from serving.exception()
            await asyncio.sleep(0.001)
        address = await serve_machines(server, spec.host) if spec.host else spec.socket_path
        dead.add_done_callback(lambda _: setattr(server, "should_exit", True))
        lifeline.serve(_handlers(control, server, dead))
        lifeline.emit(
            "ready",
            fingerprint=fingerprint,
            address=address,
            seconds={"total": time.perf_counter() - started_s},
        )
        await serving
        os.unlink(spec.socket_path)
        if llm.errored:
            with contextlib.suppress(ChannelClosed):
                lifeline.fatal(_cause(llm))
            # vLLM's shutdown would wait for the dead core; the supervisor kills the rest of the group.
            os._exit(70)
        dead.cancel()
    return 0


def _handlers(
    control: EngineControl, server: uvicorn.Server, dead: asyncio.Future[None]
) -> dict[str, Callable[..., Any]]:
    loop = asyncio.get_running_loop()

    def on_loop(method: Callable[..., Any]) -> Callable[..., Future]:
        alone = method.__name__ in ("status", "pulse", "stop")  # these calls detect a dead core themselves
        return lambda **args: asyncio.run_coroutine_threadsafe(
            method(**args) if alone else _while_alive(method(**args), dead, method.__name__), loop
        )

    async def stop() -> None:
        server.should_exit = True

    calls = (control.status, control.pulse, control.swap, control.sleep, control.wake, stop)
    return {call.__name__: on_loop(call) for call in calls} | {"unload_adapter": on_loop(control.adapters.unload)}


async def _until_dead(llm: Frontend) -> None:
    """Return when the engine core has died; vLLM's own watchdog checks only every 5 s."""
    while not llm.errored:
        await asyncio.sleep(DEAD_ENGINE_POLL_S)


def _listen(path: str) -> socket.socket:
    if os.path.exists(path):
        raise WrongState(f"{path} exists: another engine uses this socket, or a dead engine left it")
    return private_socket(path)
