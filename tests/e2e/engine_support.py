"""Small random checkpoints of real architectures, and a warm parent with replicas on top, for engine tests."""

import json
import shutil
import uuid
from pathlib import Path

import httpx
import openai

from serve.core.spec import ReplicaSpec, segment_prefix_of
from tests.claims import claim
from tests.train_support.world import WarmParent

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if tools is defined and tools %}<tool_call>{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_model(path: Path, family: str = "llama", *, seed: int, **overrides) -> Path:
    """Save a random model of `family` with tokenizer in `path`, spread so that greedy decoding survives rounding."""
    import torch
    from safetensors.torch import load_file, save_file

    from tests.train_support.tiny import make_model_dir, tokenizer

    torch.set_num_threads(1)
    words = tokenizer(
        TEMPLATE,
        ("<|bos|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"),
        {"bos_token": "<|bos|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"},
        ["the quick brown fox jumps over the lazy dog. " * 20] * 4,
    )
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "initializer_range": 0.12}
    if family == "qwen2_moe":
        sizes |= {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    make_model_dir(path, family=family, tied=family in ("qwen2", "qwen3"), seed=seed, words=words, **sizes | overrides)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("bias"):  # a zero bias would hide a bias that was not loaded
            tensor.normal_(0, 0.1)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def save_clear_model(path: Path, *, seed: int, **overrides) -> Path:
    """Save a model with clear greedy choices: after each token one token leads by five nats, which no rounding of
    another batch shape or processor changes; after a letter it is a letter.

    The layers write to dimensions that the head ignores, but values from the cache of a model with a seed of other
    parity reach dimensions that it reads, so that mixed caches change the answer."""
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
    """A private shared-memory root with a warm parent; `close` removes all its processes and files."""

    def __init__(self) -> None:
        self.root = Path("/dev/shm") / f"appliance-test-{uuid.uuid4().hex[:8]}"
        claim(self.root.name, segment_prefix_of(self.root / "run" / "x").partition(".")[0])
        (self.root / "run").mkdir(parents=True, mode=0o700)
        (self.root / "versions").mkdir(mode=0o700)
        self.logs = self.root / "run"
        self._parent = WarmParent(self.logs, "serve.engine.preload")
        self.warm_socket = self._parent.socket
        try:
            self._parent.wait()
        except BaseException:
            self.close()
            raise

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
        self._parent.close()
        shutil.rmtree(self.root)


def client(spec: ReplicaSpec) -> openai.AsyncOpenAI:
    """An unchanged SDK client over the replica's Unix socket."""
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


async def stream_ids(sdk, model, prompt, tokens, seen: list[int]):
    """Append the token ids of a greedy completion to `seen` as they arrive; return it."""
    stream = await sdk.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    async for chunk in stream:
        if chunk.choices:
            seen.extend(chunk.choices[0].model_extra.get("token_ids") or [])
    return seen


async def greedy_ids(sdk, model, prompt, tokens):
    answer = await sdk.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    return answer.choices[0].model_extra["token_ids"]


def rewrite(path: Path, target: Path, change) -> Path:
    """Copy a version with its tensors changed by `change(dict) -> dict`."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(path, target)
    file = target / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return target


def edit_config(path: Path, **changes) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
