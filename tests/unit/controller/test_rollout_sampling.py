"""What a job's ranks ask of engines: whole answers, each once, or why there are no more."""

from __future__ import annotations

import asyncio

import pytest

from appliance.controller.grading.sampling import PATIENCE_S, TRIES, RolloutSampling
from appliance.controller.interfaces.records import EngineAnswer, LineReturned
from appliance.store.objects import jobs
from tests.simulator.control_plane import SimulatedEngines
from tests.unit.controller.conftest import Control, spent

ROOM = 4


@pytest.fixture
def engines(control: Control) -> SimulatedEngines:
    assert isinstance(control.context.sampling_engines, SimulatedEngines)
    control.context.sampling_engines.rule = written
    return control.context.sampling_engines


def sampling_of(control: Control, patience_s: float = PATIENCE_S) -> RolloutSampling:
    return RolloutSampling(control.db, control.context.sampling_engines, control.context.spending, patience_s)


async def written(body):
    """As many answers as asked for, which tell where they come from."""
    params = body["sampling_params"]
    choices = [
        {
            "index": index,
            "token_ids": [body["token_ids"][0], params["seed"] + index],
            "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
        }
        for index in range(params["n"])
    ]
    return EngineAnswer(200, {"choices": choices})


def question(prompts: int, n: int, room: int = ROOM):
    return {
        "policy": {"name": ".policy/ftjob-1", "version": "step-3.ab"},
        "base": {"model": "starter", "version": "v1"},
        "prompts": [{"place": i * n, "n": n, "seed": 1000 * i, "tokens": [i, 7]} for i in range(prompts)],
        "room": room,
        "ends": [2],
    }


def by_place(told):
    found = {}
    for part in told["samples"]:
        for place, ids in enumerate(part["ids"], part["place"]):
            assert place not in found, "each is told once"
            found[place] = ids
    return found


async def test_every_answer_comes_once_from_its_own_numbers(control, engines):
    told = await sampling_of(control).sample("ftjob-1", question(3, 20))
    assert told["why"] == ""
    assert by_place(told) == {i * 20 + k: [i, 1000 * i + k] for i in range(3) for k in range(20)}
    assert {body["model"] for body in engines.sent} == {".policy/ftjob-1@step-3.ab"}
    assert engines.most_at_once <= engines.lines, "no more at once than interactive requests leave"


async def test_what_comes_back_is_asked_again_and_counts_once(control, engines):
    returned = []

    async def rule(body):
        if body["token_ids"][0] == 1 and len(returned) < 2:
            returned.append(body)
            raise LineReturned("the engine was wanted for something else", yielded=True)
        return await written(body)

    engines.rule = rule
    told = await sampling_of(control).sample("ftjob-1", question(3, 2))
    assert told["why"] == "" and len(by_place(told)) == 6 and len(returned) == 2


@pytest.mark.parametrize(
    ("error", "tries", "answered"),
    [
        (LineReturned("EngineCore died", yielded=False), 1, {0, 1, 2, 3}),
        (LineReturned("it moved", yielded=True), TRIES, {0, 1, 2, 3, 6, 7}),
    ],
)
async def test_the_ranks_get_what_engines_have_answered_and_why_there_is_no_more(
    control, engines, error, tries, answered
):
    asked = []

    async def rule(body):
        if body["token_ids"][0] == 2:
            asked.append(body)
            raise error
        return await written(body)

    engines.rule, engines.lines = rule, 1
    told = await sampling_of(control).sample("ftjob-1", question(4, 2))
    assert told["why"] == str(error) and len(asked) == tries
    assert set(by_place(told)) == answered


async def test_an_engine_that_refuses_is_not_asked_again(control, engines):
    async def rule(body):
        return EngineAnswer(400, {"error": {"message": "no such parameter"}})

    engines.rule, engines.lines = rule, 1
    told = await sampling_of(control).sample("ftjob-1", question(4, 2))
    assert told == {"samples": [], "why": "no such parameter"} and len(engines.sent) == 1


async def test_the_log_probabilities_of_a_request_are_bounded_altogether(control, engines):
    sampling = sampling_of(control)
    told = await sampling.sample("ftjob-1", question(2, 20, room=4096))
    assert told["why"] == "" and len(by_place(told)) == 40
    assert {body["sampling_params"]["n"] for body in engines.sent} == {2}
    engines.sent.clear()
    told = await sampling.sample("ftjob-1", question(2, 20, room=131_072))
    assert told["samples"] == [] and "engines write 65,536" in told["why"] and engines.sent == []


async def test_a_job_that_ends_engines_ends_two(control, engines):
    async def rule(body):
        raise LineReturned("EngineCore died", yielded=False)

    engines.rule, engines.lines = rule, 3
    sampling = sampling_of(control)
    for asked, why in (
        (3, "EngineCore died"),
        (6, "EngineCore died"),
        (6, "2 engines ended while they sampled for it"),
    ):
        assert await sampling.sample("ftjob-1", question(4, 2)) == {"samples": [], "why": why}
        assert len(engines.sent) == asked, "those that were there together ended with one"
    engines.rule = written
    assert len(by_place(await sampling.sample("ftjob-2", question(4, 2)))) == 8, "another job's are asked for"


async def test_jobs_of_one_base_share_what_its_engines_have_room_for(control, engines):
    entered, both_ask, other_is_there = asyncio.Event(), asyncio.Event(), asyncio.Event()
    first_ones = []

    async def rule(body):
        if "ftjob-2" in body["model"]:
            other_is_there.set()
        elif len(first_ones) < engines.lines:
            first_ones.append(body)
            entered.set()
            await both_ask.wait()
        else:
            await other_is_there.wait()  # for ever, if each place that it leaves is its own again
        return await written(body)

    engines.rule, engines.lines = rule, 4
    sampling = sampling_of(control)
    other = question(20, 2) | {"policy": {"name": ".policy/ftjob-2", "version": "step-1.cd"}}
    async with asyncio.timeout(60), asyncio.TaskGroup() as asking:
        first = asking.create_task(sampling.sample("ftjob-1", question(200, 2)))
        await entered.wait()
        second = asking.create_task(sampling.sample("ftjob-2", other))
        while len(sampling._asking["starter"]) < 2:
            await asyncio.sleep(0)
        both_ask.set()
    assert len(by_place(first.result())) == 400 and len(by_place(second.result())) == 40
    assert not any(sampling._asking.values())


async def test_what_a_job_asks_for_the_next_step_waits_for_this_ones(control, engines):
    """And has no share of its own beside another job's."""
    engines.lines, open_, order = 1, asyncio.Event(), []

    async def rule(body):
        await open_.wait()
        order.append(body["model"])
        return await written(body)

    engines.rule = rule
    sampling = sampling_of(control)
    ahead = {**question(2, 2), "policy": {"name": ".policy/ftjob-1", "version": "step-4.ab"}}
    async with asyncio.timeout(60), asyncio.TaskGroup() as asking:
        told = [asking.create_task(sampling.sample("ftjob-1", one)) for one in (question(3, 2), ahead)]
        while len(sampling._asking["starter"]) < 2:
            await asyncio.sleep(0)
        open_.set()
    assert order == [".policy/ftjob-1@step-3.ab"] * 3 + [".policy/ftjob-1@step-4.ab"] * 2
    assert [len(by_place(one.result())) for one in told] == [6, 4]


async def test_engine_death_with_two_questions_of_a_job_counts_once(control, engines):
    engines.lines, all_sent, sent = 8, asyncio.Event(), []

    async def rule(body):
        sent.append(body)
        if len(sent) == 4:
            all_sent.set()
        await all_sent.wait()
        raise LineReturned("EngineCore died", yielded=False)

    engines.rule = rule
    sampling = sampling_of(control)
    async with asyncio.timeout(60), asyncio.TaskGroup() as asking:
        for _ in range(2):
            asking.create_task(sampling.sample("ftjob-1", question(2, 2)))
    engines.rule = written
    assert len(by_place(await sampling.sample("ftjob-1", question(2, 2)))) == 4


class Interrupted:
    """Engines that write one token of each answer, and the rest once they are let go or interrupted: then only what is
    there."""

    def __init__(self, engines):
        self.engines, self.open, self.running = engines, asyncio.Event(), {}
        engines.rule, engines.on_interrupt = self.rule, self.interrupt

    async def rule(self, body):
        params, (version, _, _) = body["sampling_params"], body["model"].partition("@")[2].partition(".")
        step, begun, cut = int(version.removeprefix("step-")), len(body["token_ids"]) - 2, asyncio.Event()
        self.running[body["request_id"]] = step, cut
        waits = [asyncio.ensure_future(one.wait()) for one in (cut, self.open)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for one in waits:
            one.cancel()
        del self.running[body["request_id"]]
        size = 1 if cut.is_set() else params["max_tokens"]
        # Every second answer has ended before anybody interrupts it.
        choices = [
            {
                "index": index,
                "token_ids": [step] * size,
                "logprobs": {"content": [{"logprob": -float(begun + 1 + one)} for one in range(size)]},
                "finish_reason": "abort" if cut.is_set() and (begun or params["seed"] % 2 == 0) else "length",
            }
            for index in range(params["n"])
        ]
        return EngineAnswer(200, {"choices": choices})

    def interrupt(self, request_ids):
        for request_id in request_ids:
            self.running[request_id][1].set()

    async def are(self, *steps):
        while sorted(step for step, _ in self.running.values()) != list(steps):
            await asyncio.sleep(0)


def of(version, prompts, n, in_flight=True):
    return {
        **question(prompts, n),
        "policy": {"name": ".policy/ftjob-1", "version": version},
        "in_flight": in_flight,
    }


async def test_an_answer_goes_on_by_newer_weights_and_each_span_knows_its_own(control, engines):
    engines.lines, there = 8, Interrupted(engines)
    sampling = sampling_of(control)
    async with asyncio.timeout(60), asyncio.TaskGroup() as asking:
        first = asking.create_task(sampling.sample("ftjob-1", of("step-3.ab", 2, 2)))
        await there.are(3, 3, 3, 3)
        second = asking.create_task(sampling.sample("ftjob-1", of("step-4.ab", 1, 2)))
        await there.are(4, 4, 4, 4)
        third = asking.create_task(sampling.sample("ftjob-1", of("step-5.ab", 1, 2)))
        await there.are(5, 5, 5, 5, 5)
        there.open.set()
    assert all(body["sampling_params"]["n"] == 1 for body in engines.sent)
    parts = {part["place"]: part for part in first.result()["samples"]}
    assert parts.keys() == {0, 1, 2, 3} and first.result()["why"] == ""
    for place, part in parts.items():
        if place % 2:  # whole when it was interrupted
            assert part["ids"] == [[3]] and part["spans"] == [[["step-3.ab", 1]]]
        else:
            assert part["ids"] == [[3, 4, 5, 5]] and part["log_probs"] == [[-1.0, -2.0, -3.0, -4.0]]
            assert part["spans"] == [[["step-3.ab", 1], ["step-4.ab", 1], ["step-5.ab", 2]]]
    assert len(by_place(second.result())) == len(by_place(third.result())) == 2
    # What goes on says what was there, has room for the rest, and numbers of its own.
    on, begun = ([body for body in engines.sent if (len(body["token_ids"]) > 2) is later] for later in (True, False))
    assert all(body["sampling_params"]["max_tokens"] == ROOM - (len(body["token_ids"]) - 2) for body in on)
    assert not {body["sampling_params"]["seed"] for body in on} & {body["sampling_params"]["seed"] for body in begun}


async def test_an_answer_that_is_not_in_flight_is_of_one_version(control, engines):
    engines.lines, there = 8, Interrupted(engines)
    sampling = sampling_of(control)
    async with asyncio.timeout(60), asyncio.TaskGroup() as asking:
        told = [asking.create_task(sampling.sample("ftjob-1", of("step-3.ab", 2, 2, in_flight=False)))]
        await there.are(3, 3)
        told.append(asking.create_task(sampling.sample("ftjob-1", of("step-4.ab", 1, 2, in_flight=False))))
        await there.are(3, 3, 4)
        there.open.set()
    spans = [[one["spans"] for one in answered.result()["samples"]] for answered in told]
    assert spans == [[[[["step-3.ab", ROOM]]]] * 4, [[[["step-4.ab", ROOM]]]] * 2]


async def test_what_goes_on_takes_no_more_room_than_what_it_was(control, engines):
    """Sixteen answers, for which a job that is not in flight has two requests, are sixteen."""
    engines.lines, there = 2, Interrupted(engines)
    sampling = sampling_of(control)
    async with asyncio.timeout(60), asyncio.TaskGroup() as asking:
        told = asking.create_task(sampling.sample("ftjob-1", of("step-3.ab", 2, 8)))
        await there.are(*[3] * 16)
        newer = asking.create_task(sampling.sample("ftjob-1", of("step-4.ab", 1, 16)))
        await there.are(*[4] * 16)  # the eight that go on, and of the others as many as there is room for
        there.open.set()
    assert len(by_place(told.result())) == 16 and len(by_place(newer.result())) == 16


async def test_an_engine_that_dies_takes_no_answer_that_was_begun(control, engines):
    engines.lines, there = 8, Interrupted(engines)
    sampling, died = sampling_of(control), []

    async def rule(body):
        if len(body["token_ids"]) > 2 and not died:
            died.append(body)
            raise LineReturned("it was wanted", yielded=True)
        return await there.rule(body)

    engines.rule = rule
    async with asyncio.timeout(60), asyncio.TaskGroup() as asking:
        told = asking.create_task(sampling.sample("ftjob-1", of("step-3.ab", 1, 1)))
        await there.are(3)
        newer = asking.create_task(sampling.sample("ftjob-1", of("step-4.ab", 1, 1)))
        await there.are(4, 4)
        there.open.set()
    (part,) = told.result()["samples"]
    assert died and part["spans"] == [[["step-3.ab", 1], ["step-4.ab", ROOM - 1]]]
    assert newer.result()["why"] == ""


async def test_without_an_engine_the_ranks_wait_once(control, engines):
    engines.lines = 0
    sampling = sampling_of(control, patience_s=0.05)
    assert await sampling.sample("ftjob-1", question(2, 2)) == {"samples": [], "why": engines.why}
    sampling._patience_s = 1e9  # and from now on not at all, until an engine has answered
    async with asyncio.timeout(60):
        assert (await sampling.sample("ftjob-1", question(2, 2)))["samples"] == []
        engines.lines = 4
        assert len(by_place(await sampling.sample("ftjob-1", question(2, 2)))) == 4
    assert sampling._gave_up == set()


async def test_the_base_is_wanted_while_a_job_runs_that_samples_from_it(control, engines, monkeypatch):
    job_id = await control.job()
    resolved = jobs.get(control.db, job_id).resolved
    sampling = sampling_of(control)
    for phase, rollouts, expected in (
        ("running", "engine", ["starter"]),
        ("running", "ranks", []),
        ("suspended", "engine", []),
    ):
        jobs.update(control.db, job_id, resolved={**resolved, "options": {"rollouts": rollouts}})
        jobs.set_phase(control.db, job_id, phase)
        await sampling.look()
        assert engines.sampled == expected, (phase, rollouts)


async def test_the_box_looks_by_itself_as_soon_as_it_starts(control):
    for _ in range(10):
        await asyncio.sleep(0)
    assert control.context.background.degraded() == []


async def test_a_job_that_has_ended_is_forgotten(control, engines):
    async def rule(body):
        raise LineReturned("EngineCore died", yielded=False)

    engines.rule = rule
    sampling, job_id = sampling_of(control), await control.job()
    await sampling.sample(job_id, question(1, 1))
    await sampling.look()
    assert job_id in sampling._deaths and job_id in sampling._gave_up
    jobs.set_phase(control.db, job_id, "failed")
    await sampling.look()
    assert job_id not in sampling._deaths and job_id not in sampling._gave_up


async def test_what_engines_wrote_is_usage_of_the_key_that_made_the_job(control, engines):
    control.as_key("trainer")
    job_id = await control.job()
    assert len(by_place(await sampling_of(control).sample(job_id, question(3, 2)))) == 6
    (of_key,) = [one for name, one in spent(control).items() if name == "trainer"]
    assert (of_key.requests, of_key.errors, of_key.prompt_tokens, of_key.completion_tokens) == (3, 0, 6, 12)
    assert spent(control, "version")["starter@v1"].completion_tokens == 12, "no policy stands in a report"


async def test_the_ranks_sample_for_a_key_whose_quota_is_used_up(control, engines):
    control.as_key("trainer", tokens_per_day=10)
    sampling, job_id = sampling_of(control), await control.job()
    assert len(by_place(await sampling.sample(job_id, question(3, 2)))) == 6
    told = await sampling.sample(job_id, question(3, 2))
    assert told["samples"] == [] and "quota" in told["why"] and len(engines.sent) == 3


async def test_a_question_that_is_given_up_pays_for_what_was_computed(control, engines):
    control.as_key("trainer")
    entered = asyncio.Event()

    async def rule(body):
        entered.set()
        await asyncio.Event().wait()

    engines.rule, engines.lines = rule, 1
    asking = asyncio.create_task(sampling_of(control).sample(await control.job(), question(1, 2)))
    await entered.wait()
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled() and spent(control)["trainer"].prompt_tokens == 2


async def test_an_answer_that_takes_too_long_is_paid_for_by_the_time(control, engines):
    """Nobody paid for it, and each step asked for it anew."""
    control.as_key("trainer")
    job_id = await control.job()

    async def rule(body):
        return EngineAnswer(504, {"error": {"message": "no answer in time"}}, silent=True)

    engines.rule, engines.lines = rule, 1
    told = await sampling_of(control).sample(job_id, question(3, 2))
    assert told == {"samples": [], "why": "no answer in time"}
    assert spent(control)["trainer"].prompt_tokens == 2


async def test_answers_whose_numbers_cannot_be_used_are_paid_for(control, engines):
    """Those of a model that has come apart: an engine writes them all the same."""
    control.as_key("trainer")
    job_id = await control.job()

    async def rule(body):
        answer = await written(body)
        answer.body["choices"][0]["logprobs"]["content"][0]["logprob"] = -9999.0
        return answer

    engines.rule, engines.lines = rule, 1
    told = await sampling_of(control).sample(job_id, question(3, 2))
    assert told["samples"] == [] and "lack the log-probability" in told["why"]
    assert spent(control)["trainer"].prompt_tokens == 2
