"""A steady load of chat requests through the OpenAI SDK that accounts for each as its client saw it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai

PROMPTS = (
    "Tell me a short story.",
    "What is 7 plus 5?",
    "Tom has 3 apples and buys 4 more. How many apples does he have?",
    "Say hello.",
)
PAUSE_S = 0.3
"""After an error, so that a refused connection is not retried in a tight loop."""


@dataclass
class Outcome:
    """One request as its client saw it. answers: different ids among its chunks."""

    started_s: float
    ended_s: float = 0.0
    finish_reason: str | None = None
    answers: int = 0
    error: str | None = None

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s


@dataclass(frozen=True)
class LoadReport:
    """Sums over all requests. `dropped`: ended with an error; `truncated`: ended without a finish reason;
    `duplicated`: more than one answer."""

    requests: int
    dropped: int
    truncated: int
    duplicated: int
    longest_s: float
    errors: tuple[str, ...]


class Load:
    """`workers` threads that ask one after the other, half of the requests streaming, until stopped."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        model: str,
        *,
        workers: int = 4,
        max_tokens: int = 24,
        prompts: Sequence[str] = PROMPTS,
    ):
        # No retries: a request that the SDK had to send twice would hide a drop.
        self._client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=600)
        self._asked: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0}
        self._prompts, self._stopping, self._numbers = prompts, threading.Event(), itertools.count()
        self._threads = [threading.Thread(target=self._work, name=f"load-{i}") for i in range(workers)]
        self.outcomes: list[Outcome] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    @property
    def finished(self) -> int:
        return len(self.outcomes)

    def report(self) -> LoadReport:
        done = list(self.outcomes)
        return LoadReport(
            requests=len(done),
            dropped=sum(o.error is not None for o in done),
            truncated=sum(o.error is None and o.finish_reason is None for o in done),
            duplicated=sum(o.answers > 1 for o in done),
            longest_s=max((o.seconds for o in done), default=0.0),
            errors=tuple(sorted({o.error for o in done if o.error})),
        )

    def _work(self) -> None:
        while not self._stopping.is_set():
            outcome = Outcome(time.monotonic())
            try:
                self._ask(next(self._numbers), outcome)
            except openai.OpenAIError as error:
                outcome.error = f"{type(error).__name__}: {error}"
                self._stopping.wait(PAUSE_S)
            outcome.ended_s = time.monotonic()
            self.outcomes.append(outcome)

    def _ask(self, number: int, outcome: Outcome) -> None:
        messages: Any = [{"role": "user", "content": self._prompts[number % len(self._prompts)]}]
        answer: Any = self._client.chat.completions.create(messages=messages, stream=number % 2 == 0, **self._asked)
        ids = set()
        for chunk in [answer] if number % 2 else answer:
            ids.add(chunk.id)
            for choice in chunk.choices:
                outcome.finish_reason = choice.finish_reason or outcome.finish_reason
        outcome.answers = len(ids)
