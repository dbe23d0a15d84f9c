"""Extends vLLM's scheduler for an engine that may hold two versions of its weights.

`--scheduler-cls` selects it, on the CPU only: on a GPU no version is staged (serve.vllm.shm_transfer). Between swaps it
adds one attribute check to vLLM's scheduler, and paces prompts and answers (serve.cpu.prefill_pace).

    flip        current requests stay with the old weights; later ones belong to the new weights
    schedule    shows vLLM's scheduler the requests of one version and names that version to the workers (`WEIGHTS`),
                which exchange pointers if another one is in place (serve.cpu.worker)
    ...         until the last old request ends, or `move` assigns the rest to the new weights
    end         one version again

Rules
- The two versions never share KV blocks: block hashes start from a salt of their version (vLLM's `cache_salt`). A
  preempted request keeps its version and its salt.
- vLLM's limit on running requests covers both versions together: the hidden version's requests count against it.
- All requests of one answer stay with one version, including late ones.
- The workers may have either version in place when the last old request ends, so steps name theirs until `end`.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from serve.cpu.finishing import Weights, answer_of, next_turn
from serve.cpu.prefill_pace import PrefillPace

WEIGHTS = "shm_weights"  # attribute of a SchedulerOutput
SALT_BYTES = 8


@dataclass
class Flip:
    """State while two versions are in memory; `finishing` holds the ids of requests that need the old one."""

    old_version: str
    old_salt: str
    finishing: set[str]
    answers: set[str]
    last: Weights = Weights.NEW
    finished: int = 0
    moved: int = 0
    began_s: float = field(default_factory=time.monotonic)
    done: Future[dict[str, Any]] = field(default_factory=Future)

    def weights_of(self, request: Request) -> Weights:
        return Weights.OLD if request.request_id in self.finishing else Weights.NEW

    def ended(self, request_id: str) -> None:
        if request_id in self.finishing:
            self.finishing.remove(request_id)
            self.finished += 1
            self.settle()

    def settle(self) -> None:
        if not self.finishing:
            seconds = time.monotonic() - self.began_s
            self.done.set_result({"finished": self.finished, "moved": self.moved, "seconds": seconds})


class FinishingScheduler(Scheduler):
    """Owns the assignment of requests to weights. owner_of: returns a request's owner (serve.vllm.fairness.owner_places
    knows it)."""

    owner_of: Callable[[Request], int] = staticmethod(lambda request: 0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.salt = ""  # salt of new requests; vLLM's input thread reads it to hash prompts in parallel with the steps
        self._flip: Flip | None = None
        # Models that compute a prompt in one piece are not paced.
        chunks = self.scheduler_config.enable_chunked_prefill
        self._pace = PrefillPace(self.max_num_scheduled_tokens) if chunks else None
        self._step_began_s = 0.0
        self._reading: Collection[int] = ()  # owners whose prompts are being computed
        self._left_to_others = False  # a part of the step
        self.left_out: list[Request] = []  # answers that have a place and are not in the step that is being scheduled
        self._steps = 0  # in which answers were left out

    def can_finish(self) -> bool:
        """Whether current requests can finish on the old weights. Encoder outputs and connector caches are not salted,
        and a session that waits for input would hold the old weights for ever."""
        return (
            self.connector is None
            and self.ec_connector is None
            and not self.max_num_encoder_input_tokens
            and not any(request.resumable for request in self.requests.values())
        )

    def flip(self, old_version: str) -> int:
        """Record that the weights were exchanged between two steps; return how many requests finish on the old ones."""
        if self._flip is not None:
            raise RuntimeError("requests still finish on an earlier version of the weights")
        finishing = set(self.requests)
        if finishing:
            self._flip = Flip(old_version, self.salt, finishing, {answer_of(name) for name in finishing})
        self.salt = f"{secrets.token_hex(SALT_BYTES)}:"  # no caller's has a colon (serve.vllm.owner_caches)
        return len(finishing)

    def finished(self) -> Future[dict[str, Any]]:
        """Resolves when no request needs the old weights, to the numbers `finished` on them and `moved`."""
        if self._flip is None:
            raise RuntimeError("no request is finishing on old weights")
        return self._flip.done

    def move(self) -> int:
        """Call between two steps: requests that still finish on the old weights are recomputed with the new ones."""
        flip = self._flip
        if flip is None or not flip.finishing:
            return 0
        moved = [request for request in self.running if request.request_id in flip.finishing]
        self.running = [request for request in self.running if request.request_id not in flip.finishing]
        now_s = time.monotonic()
        for request in reversed(moved):
            self._preempt_request(request, now_s, drop_stale_output=True)
        # As in vLLM's reset_prefix_cache: a request preempted and resumed in one step counts as newly scheduled.
        self.prev_step_scheduled_req_ids.clear()
        for request_id in flip.finishing:
            salt(self.requests[request_id], self.salt)
        flip.moved = len(flip.finishing)
        flip.finishing.clear()
        flip.settle()
        return flip.moved

    def end(self) -> None:
        """Record that the workers have the new weights in place and have freed the old ones."""
        if self._flip is not None and self._flip.finishing:
            raise RuntimeError(f"{len(self._flip.finishing)} requests still finish on the freed weights")
        self._flip = None

    def finishing(self) -> int:
        return 0 if self._flip is None else len(self._flip.finishing)

    def answering(self, newest: str) -> str:
        """The version that computed the last step; `newest` is the one that new requests get."""
        flip = self._flip
        return flip.old_version if flip is not None and flip.last is Weights.OLD else newest

    # -- vLLM's scheduler ------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        flip = self._flip
        late = flip is not None and bool(flip.finishing) and answer_of(request.request_id) in flip.answers
        salt(request, flip.old_salt if late else self.salt)
        if late:
            flip.finishing.add(request.request_id)
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        flip = self._flip
        if self._pace is not None:
            if flip is None:
                self.left_out = self._leave_out(self._pace)
            self._share_the_step(self._pace)
        self._step_began_s = time.monotonic()
        if flip is None:
            return self._schedule_some(throttle_prefills)
        flip.last = next_turn(
            flip.last, old_ready=self._ready(flip, Weights.OLD), new_ready=self._ready(flip, Weights.NEW)
        )
        output = self._schedule_only(flip, throttle_prefills)
        if output.total_num_scheduled_tokens:
            setattr(output, WEIGHTS, flip.last)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        if self._pace is not None:
            took_s = time.monotonic() - self._step_began_s
            tokens, scheduled = scheduler_output.total_num_scheduled_tokens, scheduler_output.num_scheduled_tokens
            self._pace.computed(tokens, took_s, answers_alone=tokens == len(scheduled))
        return super().update_from_output(scheduler_output, *args, **kwargs)

    def _leave_out(self, pace: PrefillPace) -> list[Request]:
        """Takes answers out of `running` for this step if several owners have some and all of them would make it long.
        Each owner has as many in it as the others, and an owner's answers take turns. Answers of adapters stay: in
        their place vLLM would admit others, and the next step would have more adapters than allowed."""
        answers = [one for one in self.running if is_written(one)]
        if (most := pace.answers()) is None or len(answers) <= most:
            return []
        of_owners = defaultdict[int, list[Request]](list)
        for request in answers:
            of_owners[self.owner_of(request)].append(request)
        if len(of_owners) == 1 and all(self.owner_of(one) in of_owners for one in (*self.running, *self.waiting)):
            return []
        self._steps += 1
        left_out = list[Request]()
        for place, theirs in enumerate(sorted(of_owners.values(), key=len)):
            share = max(1, most // (len(of_owners) - place))
            theirs.sort(key=lambda one: getattr(one, "shm_step", 0))
            left_out += [one for one in theirs[share:] if not one.lora_request]
            most -= min(share, len(theirs))
        left = {one.request_id for one in left_out}
        self.running = [one for one in self.running if one.request_id not in left]
        for request in self.running:
            request.shm_step = self._steps
        return left_out

    def _schedule_some(self, throttle_prefills: bool) -> SchedulerOutput:
        """What is left out keeps its places."""
        active = self.max_num_active_reqs
        self.max_num_active_reqs = active - len(self.left_out)
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.max_num_active_reqs = active
            self.running, self.left_out = [*self.running, *self.left_out], []

    def _share_the_step(self, pace: PrefillPace) -> None:
        """Answers that are being written come first: vLLM gives a step's tokens away in the order of `running`. A
        prompt gets half of the rest if another request waits, so that a short one need not wait for the end of a long
        one; and all prompts that are being computed leave a third to owners who wait and have none among them. vLLM
        takes those that wait last: two long prompts of one owner had all tokens of each step until one of them ended.
        Each owner whose prompts are being computed gets as much as the others, of which they would otherwise have what
        came first."""
        writing, prompts = list[Request](), list[tuple[int, Request]]()
        of_owners = Counter[int]()
        for request in self.running:
            if is_written(request):
                writing.append(request)
            else:
                owner = self.owner_of(request)
                prompts.append((of_owners[owner], request))
                of_owners[owner] += 1
        reading = [request for _, request in sorted(prompts, key=itemgetter(0))]
        if reading:
            self.running = [*writing, *reading]
        budget = self.max_num_scheduled_tokens = pace.budget(len(writing))
        left = budget - len(writing)
        shares = max(2 if self.waiting else 1, len(of_owners))
        most = -(-left // shares) if shares > 1 else 0
        self._left_to_others = len(reading) > 1 and any(
            self.owner_of(request) not in of_owners for request in self.waiting
        )
        if self._left_to_others:
            most = max(1, min(most, (left - left // 3) // len(reading)))
        self._reading = of_owners.keys()
        self.scheduler_config.long_prefill_token_threshold = most

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """What is left for others is not for one more prompt: each prompt in progress would get less of the next
        step."""
        if self._left_to_others and self.owner_of(request) in self._reading:
            return False
        ready: bool = super()._handle_blocked_waiting_request(request)
        return ready

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        freed = super()._free_request(request, delay_free_blocks)
        if self._flip is not None:
            self._flip.ended(request.request_id)
        return freed

    # --------------------------------------------------------------------------------------------------------

    def _ready(self, flip: Flip, weights: Weights) -> bool:
        if any(flip.weights_of(request) is weights for request in self.running):
            return True
        if len(self.running) >= self.max_num_active_reqs:
            return False
        return any(
            flip.weights_of(request) is weights and may_run(request)
            for queue in (self.kv_holding_waiting, self.waiting)
            for request in queue
        )

    def _schedule_only(self, flip: Flip, throttle_prefills: bool) -> SchedulerOutput:
        """Run vLLM's own schedule on the requests of the version whose turn it is, and no others."""
        active, queues = self.max_num_active_reqs, self._queues()
        hidden = [[r for r in queue if flip.weights_of(r) is not flip.last] for queue in queues]
        self._set_queues([[r for r in queue if flip.weights_of(r) is flip.last] for queue in queues])
        self.max_num_active_reqs = active - len(hidden[0])
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.max_num_active_reqs = active
            # Old requests first, in order of arrival: vLLM preempts running requests from the end.
            pairs = zip(self._queues(), hidden, strict=True)
            old_hidden = flip.last is Weights.NEW
            self._set_queues([[*away, *seen] if old_hidden else [*seen, *away] for seen, away in pairs])

    def _queues(self) -> tuple[Iterable[Request], ...]:
        return self.running, self.waiting, self.kv_holding_waiting

    def _set_queues(self, queues: list[list[Request]]) -> None:
        running, waiting, holding = queues
        self.running = running
        self.waiting, self.kv_holding_waiting = self._queue_of(waiting), self._queue_of(holding)

    def _queue_of(self, requests: list[Request]) -> RequestQueue:
        queue = create_request_queue(self.policy)
        for request in requests:
            queue.add_request(request)
        return queue


def salt(request: Request, value: str) -> None:
    """Start the block hashes of a request from `value` and the caller's salt."""
    before = getattr(request, "shm_salt", "")
    if before == value:
        return
    request.shm_salt = value
    request.cache_salt = value + (request.cache_salt or "").removeprefix(before) or None
    request.block_hashes.clear()
    request.update_block_hashes()


def is_written(request: Request) -> bool:
    """Whether its prompt is computed, so that a step takes only one token of it: of its answer."""
    return bool(request.num_tokens - request.num_computed_tokens <= 1)


def may_run(request: Request) -> bool:
    """Whether nothing but a place keeps a waiting request from running."""
    if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        return request.structured_output_request.grammar is not None
    return not Scheduler._is_blocked_waiting_status(request.status)
