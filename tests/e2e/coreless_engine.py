"""vLLM's own server in this process, with all that it does to a request but the model's own computing.

Its routes, request models, conversions, chat templates, checks and its grammars are the engine's, with this project's
changes to them. In the core's place each request is packed as for the core, taken in as by the model runner for GPUs,
its grammar is compiled by vLLM's manager, and a few of the tokens that it allows are the answer. So what an engine
makes of a request takes milliseconds to see.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TOKENS = 3
WORDS = 12


class NoCore:
    """Stands for vLLM's client of the engine core. seed: of the tokens of answers. dies: it ends after the first token
    of its next answer, and lives again for the request after that."""

    engine_ranks_managed = (0,)
    dies = False

    def __init__(self, config: Any, tasks: tuple[str, ...], seed: int) -> None:
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
        from vllm.v1.structured_output import StructuredOutputManager

        from tests.e2e.gpu_runner import GpuRunner

        self.resources = SimpleNamespace(engine_dead=False)
        self._tasks = tasks
        self._config = config
        self._random = random.Random(seed)
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)
        self._manager = StructuredOutputManager(config)
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._runner = GpuRunner(config)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return self._tasks

    async def get_output_async(self) -> Any:
        made = await self._outputs.get()
        if isinstance(made, Exception):
            raise made
        return made

    async def abort_requests_async(self, requests: list[str]) -> None:
        del requests

    def shutdown(self, timeout: float | None = None) -> None:
        del timeout

    async def add_request_async(self, request: Any) -> None:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
        from vllm.v1.engine.exceptions import EngineDeadError
        from vllm.v1.request import Request

        if self.dies:
            self.dies = False
            first = EngineCoreOutput(request.request_id, [WORDS])
            self._outputs.put_nowait(EngineCoreOutputs(outputs=[first]))
            # Only what waits for it after this token hears of it.
            asyncio.get_running_loop().call_later(0.2, self._outputs.put_nowait, EngineDeadError())
            return
        taken = Request.from_engine_core_request(self._decoder.decode(self._encoder.encode(request)), None)
        if taken.pooling_params is not None:
            import torch

            made = EngineCoreOutput(taken.request_id, [], pooling_output=torch.ones(8), finish_reason=FinishReason.STOP)
        else:
            self._take(taken)
            tokens, follows = await asyncio.to_thread(self._answer, taken)
            asked = taken.sampling_params
            made = EngineCoreOutput(
                taken.request_id,
                tokens,
                new_logprobs=_logprobs(tokens, asked.num_logprobs),
                new_prompt_logprobs_tensors=_prompt_logprobs(taken.prompt_token_ids or [], asked.prompt_logprobs),
                finish_reason=FinishReason.LENGTH if follows else FinishReason.ERROR,
            )
        self._outputs.put_nowait(EngineCoreOutputs(outputs=[made], finished_requests={taken.request_id}))

    def _take(self, request: Any) -> None:
        try:
            self._runner.take(request)
        except Exception as error:
            raise RuntimeError(f"this request ends an engine on GPUs: {error!r}") from error

    def _answer(self, request: Any) -> tuple[list[int], bool]:
        """The tokens of an answer; False where an engine would end the request with an error after the last of them."""
        form = request.structured_output_request
        if form is None:
            return [self._random.randrange(WORDS, 200) for _ in range(TOKENS)], True
        self._manager.grammar_init(request)
        form._grammar.exception()
        grammar: Any = form.grammar
        tokens: list[int] = []
        if isinstance(grammar, Exception):
            return tokens, False
        mask = self._manager.backend.allocate_token_bitmask(1)
        for _ in range(TOKENS):
            if grammar.is_terminated():
                break
            grammar.fill_bitmask(mask, 0)
            allowed = [
                32 * place + bit for place, word in enumerate(mask[0].tolist()) for bit in range(32) if word >> bit & 1
            ]
            # A sampler picks a token however few are allowed; the grammar then refuses it.
            token = self._random.choice(allowed or [WORDS])
            tokens.append(token)
            if not grammar.accept_tokens(request.request_id, [token]):
                return tokens, False
        return tokens, True


def _logprobs(tokens: list[int], most: int | None) -> Any:
    import numpy as np
    from vllm.v1.outputs import LogprobsLists

    if most is None:
        return None
    ids = np.tile(np.array(tokens, dtype=np.int64)[:, None], (1, max(most, 0) + 1))
    return LogprobsLists(ids, np.full(ids.shape, -1.0, dtype=np.float32), np.ones(len(tokens), dtype=np.int64))


def _prompt_logprobs(prompt: list[int], most: int | None) -> Any:
    import torch
    from vllm.v1.outputs import LogprobsTensors

    if most is None:
        return None
    ids = torch.tensor(prompt[1:], dtype=torch.int64)[:, None].repeat(1, max(most, 0) + 1)
    return LogprobsTensors(ids, torch.full(ids.shape, -1.0), torch.ones(len(ids), dtype=torch.int64))


async def application(spec: Any, seed: int = 1) -> Any:
    """vLLM's ASGI application for this spec, once per process. Raises what vLLM raises."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.v1.engine.core_client import EngineCoreClient

    from serve.api.answers import Answers
    from serve.api.application import set_up
    from serve.engine.main import PARSER
    from serve.load.version_check import read_chat_template, read_config
    from serve.vllm import patches, plugin
    from serve.vllm.arguments import engine_arguments, engine_environment
    from serve.vllm.frontend import Frontend

    os.environ.update(engine_environment(spec, 64))
    Path(spec.scratch_path).mkdir(mode=0o700, exist_ok=True)
    tempfile.tempdir = spec.scratch_path
    options = PARSER.parse_args(
        engine_arguments(spec, read_config(spec.version_path), read_chat_template(spec.version_path))
    )
    patches.apply(spec.kind, eager=True, segment_prefix=spec.segment_prefix)
    plugin.register()
    tasks = ("embed",) if spec.task == "embed" else ("generate",)
    config = AsyncEngineArgs.from_cli_args(options).create_engine_config()
    EngineCoreClient.make_async_mp_client = staticmethod(lambda vllm_config, **_: NoCore(vllm_config, tasks, seed))
    llm = Frontend(vllm_config=config, executor_class=object, log_stats=False, log_requests=False)
    app = build_app(options, tasks, llm.model_config)
    await init_app_state(llm, app.state, options, tasks)
    set_up(app)
    app.state.server = SimpleNamespace(should_exit=False)
    app.state.core = llm.engine_core
    app.state.revive = lambda: setattr(llm, "output_handler", None)
    return Answers(app, lambda: spec.version)


def spec(root: Path, task: str) -> Any:
    """Of an engine with a small random model in `root`, which is made if it is not there."""
    from serve.core.spec import ReplicaSpec
    from tests.e2e.engine_support import save_model

    version = root / "version"
    (root / "run").mkdir(parents=True, exist_ok=True)
    if not version.exists():
        save_model(version, "qwen3", seed=1)
    return ReplicaSpec(
        replica_id=task,
        model="starter",
        version="version",
        version_path=str(version),
        socket_path=str(root / "run" / f"{task}.sock"),
        devices=(0,),
        kind="cpu",
        shm_root=str(root),
        kv_cache_bytes=1 << 24,
        max_num_seqs=8,
        task=task,
    )
