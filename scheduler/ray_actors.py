"""Named detached actors: started or found, asked, and waited for. They outlive the controller that started them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from runtime.errors import RuntimeLayerError
from scheduler.errors import EffectFailed
from serve.errors import ServeError
from train.errors import TrainError

UNNAMED_TIMEOUT_S = 30.0


def named_actor(body: type, name: str, ray_node_id: str, *arguments: Any) -> Any:
    """Start or find a thin supervisor on a node: named, detached, restart left to us, no resources (the lease
    fences)."""
    here = NodeAffinitySchedulingStrategy(ray_node_id, soft=False)
    return (
        ray.remote(body)
        .options(
            name=name,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=64,
            max_restarts=0,
            scheduling_strategy=here,
        )  # fmt: skip
        .remote(*arguments)
    )


def find_actor(name: str) -> Any | None:
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


async def actor_names() -> list[str]:
    return await asyncio.to_thread(list_named_actors)


async def until_unnamed(name: str) -> None:
    async with asyncio.timeout(UNNAMED_TIMEOUT_S):
        while name in await actor_names():
            await asyncio.sleep(0.01)


async def ask(verb: str, target: str, answer: Awaitable[Any]) -> Any:
    """Await an actor's or group's answer; whatever goes wrong there becomes EffectFailed, with its first line."""
    try:
        return await answer
    except RayError as error:
        cause = getattr(error, "cause", None) or error
        raise EffectFailed(verb, target, first_line(cause)) from error
    except (RuntimeLayerError, ServeError, TrainError, OSError, TimeoutError) as error:
        raise EffectFailed(verb, target, first_line(error)) from error


def first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
