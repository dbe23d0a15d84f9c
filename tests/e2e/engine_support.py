"""Small random checkpoints of real architectures, and a warm parent with replicas on top, for engine tests."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import httpx
import openai

from runtime.processes.warm_parent import WARM_ENV
from serve.core.spec import ReplicaSpec, segment_prefix_of
from tests.claims import claim

REPOSITORY = Path(__file__).resolve().parents[2]
VOCABULARY = 384
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if tools is defined and tools %}<tool_call>{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tokenizer(path: Path) -> None:
    """A byte-level BPE tokenizer with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog. " * 20] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|end|>", pad_token="<|pad|>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)


def save_model(path: Path, family: str = "llama", *, seed: int, **overrides) -> Path:
    """A random model of `family` with its tokenizer in `path`, weights wide enough apart that greedy decoding is
    stable against rounding."""
    import torch
    import transformers

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    base = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.12,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    extra = {
        "llama": ("Llama", {}),
        "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
        "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
        "mistral": ("Mistral", {}),
        "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        "qwen2_moe": (
            "Qwen2Moe",
            {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 128,
                "shared_expert_intermediate_size": 128,
            },
        ),
    }[family]
    prefix, changes = extra
    config_class = getattr(transformers, f"{prefix}Config")
    config = config_class(**{**base, **changes, **overrides})
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # a zero bias would hide a bias that was not loaded
                parameter.normal_(0, 0.1)
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


def save_clear_model(path: Path, *, seed: int, **overrides) -> Path:
    """A model whose greedy choices are clear: after each token one other leads by five nats, which no rounding of
    another batch shape or processor changes, and after a letter it is a letter.

    What its layers compute goes where its head does not read. Keys and values of a model whose seed has other parity
    go where it does, so that mixed caches change the answer.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    save_model(path, seed=seed, **overrides)
    file = path / "model.safetensors"
    tensors = load_file(file)
    made = torch.Generator().manual_seed(seed)
    rows, width = tensors["lm_head.weight"].shape
    read = width * 3 // 4
    tokenizer = AutoTokenizer.from_pretrained(path)
    letters = tokenizer.convert_tokens_to_ids(list("abcdefghijklmnopqrstuvwxyz"))
    special = tokenizer.all_special_ids
    others = [token for token in range(len(special), rows) if token not in letters]
    follows = {token: others[0] for token in range(rows)}
    for group in (letters, others):
        order = [group[place] for place in torch.randperm(len(group), generator=made)]
        follows |= dict(zip(order, order[1:] + order[:1], strict=True))
    embedding, head = torch.zeros(rows, width), torch.zeros(rows, width)
    directions = torch.nn.functional.normalize(torch.randn(rows, read, generator=made))
    embedding[:, :read] = directions * read**0.5
    for token, following in follows.items():
        head[following, :read] += directions[token] * 2.0
    tensors["model.embed_tokens.weight"], tensors["lm_head.weight"] = embedding, head
    for name, tensor in tensors.items():
        if name.endswith("v_proj.weight"):
            tensor[(seed + 1) % 2 :: 2] = 0
        elif name.endswith("o_proj.weight"):
            tensor[:read, seed % 2 :: 2] = 0
            tensor[:read, (seed + 1) % 2 :: 2] *= 20
        elif name.endswith("down_proj.weight"):
            tensor[:read] = 0
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    return path


class Box:
    """A private shared-memory root with a warm parent; `close` leaves neither process nor file."""

    def __init__(self) -> None:
        self.root = Path("/dev/shm") / f"appliance-test-{uuid.uuid4().hex[:8]}"
        claim(self.root.name, segment_prefix_of(self.root / "run" / "x").partition(".")[0])
        (self.root / "run").mkdir(parents=True, mode=0o700)
        (self.root / "versions").mkdir(mode=0o700)
        self.warm_socket = self.root / "run" / "warm.sock"
        self.logs = self.root / "run"
        began_s = time.perf_counter()
        self._parent = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "runtime.processes.warm_parent",
                str(self.warm_socket),
                "serve.engine.preload",
                str(self.logs / "warm.log"),
            ],
            cwd=REPOSITORY,
            env={**os.environ, **dict(WARM_ENV), "PYTHONPATH": str(REPOSITORY)},
        )
        try:
            self._await_parent(began_s)
        except BaseException:
            self.close()
            raise
        self.warm_s = time.perf_counter() - began_s

    def _await_parent(self, began_s: float) -> None:
        while not self.warm_socket.exists():
            if self._parent.poll() is not None:
                raise RuntimeError(f"warm parent ended:\n{(self.logs / 'warm.log').read_text()[-4000:]}")
            if time.perf_counter() - began_s > 180:
                raise RuntimeError("warm parent did not come up")
            time.sleep(0.05)

    def version(self, name: str, family: str = "llama", *, seed: int, **overrides) -> Path:
        path = self.root / "versions" / name
        return path if path.exists() else save_model(path, family, seed=seed, **overrides)

    def spec(self, replica: str, path: Path, **overrides) -> ReplicaSpec:
        values = {
            "replica_id": replica,
            "model": "starter",
            "version": path.name,
            "version_path": str(path),
            "socket_path": str(self.root / "run" / f"{replica}.sock"),
            "devices": (0,),
            "kind": "cpu",
            "shm_root": str(self.root),
            "kv_cache_bytes": 16 * 2**20,
            "max_num_seqs": 8,
        }
        return ReplicaSpec(**{**values, **overrides})

    def close(self) -> None:
        self._parent.send_signal(signal.SIGTERM)
        try:
            self._parent.wait(5)
        except subprocess.TimeoutExpired:
            self._parent.kill()
            self._parent.wait()
        shutil.rmtree(self.root)


def client(spec: ReplicaSpec) -> openai.AsyncOpenAI:
    """The unchanged SDK over the replica's Unix socket."""
    transport = httpx.AsyncHTTPTransport(uds=spec.socket_path)
    return openai.AsyncOpenAI(
        base_url="http://engine/v1",
        api_key="unused",
        max_retries=0,
        http_client=httpx.AsyncClient(transport=transport, timeout=60),
    )


async def greedy(sdk: openai.AsyncOpenAI, model: str, prompt: str = "the quick brown", tokens: int = 24):
    """(token strings, log-probabilities) of a greedy completion."""
    answer = await sdk.completions.create(
        model=model, prompt=prompt, max_tokens=tokens, temperature=0, logprobs=1, extra_body={"ignore_eos": True}
    )
    logprobs = answer.choices[0].logprobs
    return logprobs.tokens, logprobs.token_logprobs


def rewrite(path: Path, target: Path, change) -> Path:
    """Copy a version, passing its tensors through `change(dict) -> dict`."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(path, target)
    file = target / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return target


def edit_config(path: Path, **changes) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
