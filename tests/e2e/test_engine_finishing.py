"""A staged swap under open streams: the version that began an answer ends it, and then its weights go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
import torch

from serve.core.config import EngineConfig
from serve.core.errors import VersionMismatch
from tests.e2e.engine_support import client, rewrite
from weights.memory.locks import DirectoryLock

# Many times as long as staging takes on a quiet machine: on a busy one the engine decodes on while staging waits.
TOKENS = 300
# Of an answer that is only to show whose weights are there.
FEW = 40
# Longer than a block of the KV cache, so that prefixes are shared within a version, and may not be across two.
PREFIX = [(7 * index) % 300 + 20 for index in range(180)]
PROMPTS = [[*PREFIX, 11], [*PREFIX, 12, 13], [30, 40, 50]]
KV_BYTES = 20 * 64 * 1024
STRUCTURED = {"structured_outputs": {"regex": "[a-z]{250}"}}


async def stream(sdk, prompt, seen: list[int], tokens: int = TOKENS, **more) -> str:
    """Appends token ids to `seen`; returns the version that the answer names, both where it was moved."""
    extra = {"ignore_eos": True, "return_token_ids": True, **more.pop("extra", {})}
    answer = await sdk.completions.with_raw_response.create(
        model="starter", prompt=prompt, max_tokens=tokens, temperature=0, stream=True, extra_body=extra, **more
    )
    async for event in answer.parse():
        if event.choices:
            seen.extend(event.choices[0].model_extra.get("token_ids") or [])
            version = event.system_fingerprint
    begun = answer.headers["x-appliance-model-version"]
    return version if begun == version else f"{begun}, then {version}"


async def answer(sdk, prompt, **more) -> list[int]:
    seen: list[int] = []
    await stream(sdk, prompt, seen, **more)
    return seen


ASKED = [(prompt, {}) for prompt in PROMPTS] + [([5, 6, 7], STRUCTURED)]


async def answers(sdk, tokens: int = TOKENS) -> list[list[int]]:
    """Answers to all prompts, side by side: a quarter of the engine's steps."""
    return await asyncio.gather(*(answer(sdk, prompt, tokens=tokens, extra=extra) for prompt, extra in ASKED))


async def undisturbed(sdk) -> list[list[int]]:
    """Answers to all prompts; the beginning of each is that of one alone."""
    together = await answers(sdk)
    assert [await answer(sdk, prompt, tokens=FEW, extra=extra) for prompt, extra in ASKED] == begun(together)
    return together


def begun(whole: list[list[int]]) -> list[list[int]]:
    return [seen[:FEW] for seen in whole]


class Open:
    """Streams of all prompts under way, and what else was asked then."""

    def __init__(self, sdk, *others: Callable[[], Awaitable]):
        self.seen: list[list[int]] = [[] for _ in ASKED]
        self.tasks = [
            asyncio.create_task(stream(sdk, prompt, seen, extra=extra))
            for (prompt, extra), seen in zip(ASKED, self.seen, strict=True)
        ]
        self.others = [asyncio.ensure_future(other()) for other in others]

    async def at(self, tokens: int) -> None:
        while min(map(len, self.seen)) < tokens:
            await asyncio.sleep(0.001)

    async def begun(self) -> None:
        """One of them at least; others may wait for room in the KV cache."""
        while not any(self.seen):
            await asyncio.sleep(0.001)

    async def ended(self) -> list[str]:
        await asyncio.gather(*self.others)
        return await asyncio.gather(*self.tasks)


async def swapped_under(sdk, replica, path: Path, back: Path, *others) -> tuple[dict, Open, Open]:
    """A staged swap under open streams, none of which ends before new ones have begun: its report, those, and the new
    ones. Done again where a machine without a core to spare lets the engine decode while all else waits: its client,
    and staging, which has low priority."""
    for _ in range(10):
        old = Open(sdk, *others)
        await old.at(5)
        report = await replica.swap("starter", path.name, str(path), how="staged")
        new = Open(sdk)
        await new.begun()
        if not any(task.done() for task in old.tasks):
            return report, old, new
        await asyncio.gather(old.ended(), new.ended())
        await replica.swap("starter", back.name, str(back), how="staged")
    raise AssertionError(f"no stream was left when others had begun on the new version: {report}")


async def over(replica) -> dict:
    """What came of the streams that finished on the version before, once its weights are gone."""
    async with asyncio.timeout(100):
        while (status := await replica.status())["finishing"] or status["finished"] is None:
            await asyncio.sleep(0.01)
    return status["finished"]


async def preemptions(spec) -> float:
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=spec.socket_path)) as plain:
        text = (await plain.get("http://engine/metrics")).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:num_preemptions_total"))


def is_leased(path: Path) -> bool:
    lock = DirectoryLock.try_exclusive(path)
    if lock is not None:
        lock.close()
    return lock is None


async def test_one_version_answers_a_stream_from_its_first_token_to_its_last(engine_box, replicas):
    # Equal tokens in other batches are promised of clear choices alone.
    a, b = engine_box.clear_version("clear-a", seed=1), engine_box.clear_version("clear-b", seed=2)
    # Too few KV blocks for both sides to end undisturbed: some are preempted, and go on with their own version.
    spec = engine_box.spec("finish", a, kv_cache_bytes=KV_BYTES, max_num_seqs=16)
    replica = replicas()
    await replica.start(spec)
    sdk = client(spec)
    of_a = await undisturbed(sdk)
    assert (await replica.swap("starter", b.name, str(b), how="staged"))["finishing"] == 0
    of_b = await answers(sdk)
    assert all(x != y for x, y in zip(of_a, of_b, strict=True))
    await replica.swap("starter", a.name, str(a), how="staged")
    assert await answers(sdk, FEW) == begun(of_a)

    def two_answers():
        return sdk.completions.with_raw_response.create(
            model="starter",
            prompt=PROMPTS[2],
            max_tokens=TOKENS,
            n=2,
            logprobs=1,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )

    # Both sides at once, sharing prompts: each finds its own prefixes only.
    report, old, new = await swapped_under(sdk, replica, b, a, two_answers)
    assert (report["finishing"], report["fingerprint_on"]) == (len(old.tasks) + 2, "staged")
    assert is_leased(a)
    assert (set(await old.ended()), set(await new.ended())) == ({a.name}, {b.name})
    assert (old.seen, new.seen) == (of_a, of_b)
    # Sent after the swap, and yet the old version's.
    pair = await old.others[0]
    assert pair.headers["x-appliance-model-version"] == a.name
    both = pair.parse()
    assert both.system_fingerprint == a.name
    assert [len(choice.model_extra["token_ids"]) for choice in both.choices] == [TOKENS] * 2
    told = await over(replica)
    assert (told["version"], told["finished"], told["moved"], told["why"]) == (a.name, len(old.tasks) + 2, 0, None)
    assert await preemptions(spec) > 0
    assert not is_leased(a)
    assert await answers(sdk, FEW) == begun(of_b)

    # A client that leaves gives up the old weights too.
    report, gone, new = await swapped_under(sdk, replica, a, b)
    assert report["finishing"] == len(gone.tasks)
    for task in gone.tasks:
        task.cancel()
    await new.ended()
    assert (await over(replica))["version"] == b.name

    # Another swap, whatever its way, takes what is left to the newest version; nothing is lost.
    for how in ("staged", "in-place"):
        left = Open(sdk)
        await left.at(5)
        await replica.swap("starter", b.name, str(b), how="staged")
        await replica.swap("starter", a.name, str(a), how=how)
        await left.ended()
        assert [len(seen) for seen in left.seen[:-1]] == [TOKENS] * len(PROMPTS)
        assert len(left.seen[-1]) == len(of_a[-1])
        told = await over(replica)
        assert await answers(sdk, FEW) == begun(of_a), how

    await replica.sleep()
    await replica.wake("starter", b.name, str(b))
    assert await answers(sdk, FEW) == begun(of_b)


async def test_a_head_that_is_stored_beside_the_embedding_it_is_tied_to_changes_nothing(engine_box, replicas):
    """As some converters write it. vLLM keeps one of the two where they are equal: exchanged as two, the embedding was
    the other version's from the first step on."""

    def stored_twice(name, seed):
        tied = engine_box.version(f"{name}-tied", "qwen2", seed=seed)
        embedding = "model.embed_tokens.weight"
        return rewrite(tied, tied.parent / name, lambda t: {**t, "lm_head.weight": t[embedding].clone()})

    a, b = stored_twice("twice-a", 1), stored_twice("twice-b", 2)
    spec = engine_box.spec("twice", a, max_num_seqs=16)
    replica = replicas()
    await replica.start(spec)
    sdk = client(spec)
    of_a = await undisturbed(sdk)
    await replica.swap("starter", b.name, str(b), how="staged")
    of_b = await answers(sdk)
    await replica.swap("starter", a.name, str(a), how="staged")
    _, old, new = await swapped_under(sdk, replica, b, a)
    await asyncio.gather(old.ended(), new.ended())
    assert (old.seen, new.seen) == (of_a, of_b)

    # Here the two differ, and the engine has no place for the second.
    c = rewrite(b, b.parent / "twice-c", lambda t: {**t, "lm_head.weight": torch.ones_like(t["lm_head.weight"])})
    with pytest.raises(VersionMismatch, match="lm_head.weight differ"):
        await replica.swap("starter", c.name, str(c))
    assert await answers(sdk, FEW) == begun(of_b)


async def test_streams_that_finish_too_slowly_are_moved_and_the_old_weights_go(engine_box, replicas):
    a, b = engine_box.version("a", seed=1), engine_box.version("b", seed=2)
    spec = engine_box.spec("bound", a)
    replica = replicas(EngineConfig(swap_finish_timeout_s=0.05))
    await replica.start(spec)
    sdk = client(spec)
    of_a = await answers(sdk)
    for _ in range(10):  # again where one of them came to its end in this twentieth of a second
        report, left, new = await swapped_under(sdk, replica, b, a)
        assert report["finishing"] == len(left.tasks)
        told = await over(replica)
        if told["moved"] == len(left.tasks):
            break
        await asyncio.gather(left.ended(), new.ended())
        await replica.swap("starter", a.name, str(a), how="staged")
    assert (told["moved"], told["why"]) == (len(left.tasks), "time was up")
    assert not is_leased(a)
    assert (set(await left.ended()), set(await new.ended())) == ({"a, then b"}, {"b"})
    # Each goes on as the new version would with its text so far.
    for prompt, whole, seen in zip(PROMPTS, of_a, left.seen, strict=False):
        assert len(seen) == TOKENS
        switch = next(place for place in range(TOKENS) if seen[place] != whole[place])
        # The first new token may equal the old version's; the switch then lies a little earlier.
        cuts = range(max(switch - 4, 0), switch + 1)
        rests = await asyncio.gather(*(answer(sdk, prompt + seen[:cut], tokens=min(FEW, TOKENS - cut)) for cut in cuts))
        assert any(seen[cut : cut + FEW] == rest for cut, rest in zip(cuts, rests, strict=True))
