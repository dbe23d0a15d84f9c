"""What is learned about standby replicas: enough for the target, no dearer than needed, and from the past alone."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler.autoscale import demand as demand_
from scheduler.autoscale.shadow import Seen, Shadow, standby_costs
from scheduler.autoscale.standby import StandbyLearner, levels
from scheduler.autoscale.surges import Surges
from scheduler.autoscale.trials import Bursts, Stint
from scheduler.core.config import SchedulerConfig, WhenLate
from scheduler.core.idle import Idle, IdleSettings
from scheduler.core.workload import Demand, DeploymentView, Hysteresis, Standby

CONFIG = SchedulerConfig()
LOOK_S = 0.25


def learner(*, least: int = 1, most: int = 8, late_share: float = 0.01) -> StandbyLearner:
    costs = standby_costs(CONFIG, 8)
    return StandbyLearner(costs, least=least, most=most, target_s=2.0, late_share=late_share)


def poisson(rng: random.Random, mean: float) -> int:
    count, product = 0, rng.random()
    while product > math.exp(-mean):
        count, product = count + 1, product * rng.random()
    return count


def lived(
    work_per_s: Callable[[float], float], minutes: float, seed: int = 0, *, load: float = 0.0, late_share: float = 0.01
) -> tuple[StandbyLearner, list[Standby]]:
    """Requests of 0.05 replica-seconds each, at this rate of work; the choice after every minute."""
    rng, found, chosen = random.Random(seed), learner(late_share=late_share), []
    for look in range(int(minutes * 60 / LOOK_S)):
        now_s = look * LOOK_S
        requests = poisson(rng, work_per_s(now_s) * LOOK_S / 0.05)
        best = found.seen(now_s, Seen([0.05] * requests, load, running=load, awake=found.best.replicas))
        if look % int(60 / LOOK_S) == 0:
            chosen.append(best)
    return found, chosen


def test_late_requests_within_a_minute_are_one_burst() -> None:
    bursts = Bursts()
    assert bursts.mean == 1.0
    for at_s, late in ((0.0, 2), (59.0, 2), (200.0, 1), (400.0, 1)):
        bursts.seen(at_s, late, 1.0)
    assert bursts.mean == (4 * 4 + 1 + 1) / 6
    bursts.seen(500.0, 4, 0.5)
    assert bursts.mean == (18 / 2 + 16) / (6 / 2 + 4), "earlier ones fade"


def test_levels_are_every_number_up_to_eight_then_few() -> None:
    assert levels(0, 3) == [0, 1, 2, 3] and levels(1, 8) == list(range(1, 9)) and levels(2, 2) == [2]
    many = levels(1, 512)
    assert many[-1] == 512 and many == sorted(set(many)) and len(many) < 40
    assert levels(3, 0) == [0], "never more than there may be"
    splits = levels(1, 1024, 64, 33 / 32)
    assert splits[:64] == list(range(1, 65)) and len(splits) < 170, "every static split of a box of 64"


@pytest.mark.parametrize("seed", range(3))
def test_flat_load_gets_what_it_needs_and_no_more(seed: int) -> None:
    _, chosen = lived(lambda t: 2.4, 15, seed)
    assert {c.replicas for c in chosen[5:]} <= {3, 4}, "2.4 devices of work: two would drown, five idle"


def test_bursts_too_quick_to_react_to_are_met_on_standby() -> None:
    def bursts(t: float) -> float:
        return 8.0 if t % 60 < 2 else 0.1

    _, chosen = lived(bursts, 20)
    assert all(c.replicas >= 4 for c in chosen[5:]), "16 replica-seconds within two seconds, due in two more"
    _, lenient = lived(bursts, 20, late_share=0.9)
    assert lenient[-1].replicas < chosen[-1].replicas, "where they may be late, training has the devices"


def test_load_that_comes_slowly_is_followed_not_awaited() -> None:
    _, chosen = lived(lambda t: 3.0 - 2.7 * math.cos(2 * math.pi * t / 1800), 60)
    kept = [c.replicas for c in chosen[20:]]
    assert sum(kept) / len(kept) <= 5, "its peak of six is taken when it comes, not kept for all hours"


def test_what_was_learned_fades() -> None:
    found, chosen = lived(lambda t: 8.0 if t < 600 and t % 30 < 2 else 0.3, 10)
    assert chosen[-1].replicas >= 4
    rng = random.Random(1)
    for look in range(4 * 3600 * 4):
        requests = poisson(rng, 0.3 * LOOK_S / 0.05)
        best = found.seen(600 + look * LOOK_S, Seen([0.05] * requests, awake=found.best.replicas))
    assert best.replicas <= 2


def after_a_surge(minutes: int, per_s: int, awake_then: int = 6) -> tuple[StandbyLearner, list[Standby]]:
    """Twenty minutes of 40 requests a second, half of them late with this many awake, after half an hour of 6. Then
    `per_s` come; the choice in each minute of that."""
    found, chosen = learner(), []
    for second in range(60 * (50 + minutes)):
        in_surge = 1800 <= second < 3000
        requests = 40 if in_surge else 6 if second < 3000 else per_s
        awake = awake_then if in_surge else found.best.replicas
        best = found.seen(second, Seen([0.05] * requests, late=requests // 2 if in_surge else 0, awake=awake))
        if second >= 3000 and second % 60 == 0:
            chosen.append(best)
    return found, chosen


def test_what_a_surge_made_late_is_forgotten_half_an_hour_after_it() -> None:
    found, chosen = after_a_surge(60, 6)
    assert min(c.replicas for c in chosen[2:30]) >= 2, "until then it may come back"
    assert chosen[-1].replicas == 1, "what faded by half an hour's constant was above the allowance for hours more"
    assert found._requests < 6 * 1800, "the surge's requests give no allowance either"
    assert found._constants[0].late < 0.01 * found._requests


def test_a_surge_that_all_devices_together_make_late_is_not_forgotten() -> None:
    found, _ = after_a_surge(60, 6, awake_then=8)
    assert found._requests > 6 * 1800


def test_a_silence_after_a_surge_is_not_traffic_to_learn_from() -> None:
    found, _ = after_a_surge(60, 0)
    assert found._constants[0].late > found._requests > 30


@pytest.mark.parametrize(("after", "over"), [(1.0, True), (2.0, False)])
def test_a_surge_is_over_once_no_five_minutes_of_thirty_bring_a_third_of_its_work(after: float, over: bool) -> None:
    surges = Surges()
    found: list[tuple[int, float]] = []
    for minute in range(120):
        step = surges.over(minute * 60.0, 60 * (5.0 if 30 <= minute < 50 else after), lambda: [])
        if step is not None:
            found.append((minute, step.at_s / 60))
            surges.forget()
    assert found == ([(80, 50)] if over else [])


def test_requests_in_flight_ask_by_their_number() -> None:
    _, chosen = lived(lambda t: 0.3, 5, load=2.9)
    assert chosen[-1].replicas == 3


def test_a_backlog_asks_for_more_than_stands_by() -> None:
    assert Standby(1, 0.5).asked_by_backlog(2.5, 2.0) == 3
    assert Standby(1, 0.25, 2).asked_by_backlog(1.2, 2.0) == 6, "twice three"
    assert Standby(3, 0.25, 2).asked_by_backlog(1.2, 2.0) == 3, "those are there"
    model = DeploymentView(
        "m",
        "v1",
        max_replicas=8,
        prefill_tokens_per_s=1000.0,
        ttft_target_s=2.0,
        demand=Demand(inflight=1, waiting_tokens=2500, last_request_s=9.0),
    )
    assert demand_.wanted_now(model, 10.0, CONFIG) == 3, "half of the target before anything is learned"
    assert demand_.wanted_now(replace(model, standby=Standby(1, 0.25, 2)), 10.0, CONFIG) == 8, "at most max_replicas"


def test_time_per_token_above_its_target_asks_for_more() -> None:
    model = DeploymentView(
        "m",
        "v1",
        max_replicas=8,
        target_inflight=10,
        tpot_target_s=0.05,
        demand=Demand(inflight=20, last_request_s=9.0, tpot_p95_s=0.04),
    )

    def at(tpot_p95_s: float | None) -> int:
        return demand_.wanted_now(replace(model, demand=replace(model.demand, tpot_p95_s=tpot_p95_s)), 10.0, CONFIG)

    assert at(None) == at(0.04) == at(0.05) == 2
    assert at(0.07) == 3 and at(0.1) == 4
    assert at(10.0) == 4, "no more than twice as many by one look"
    assert demand_.wanted_now(replace(model, tpot_target_s=None), 10.0, CONFIG) == 2


def test_standby_is_kept_while_the_model_is_in_use_and_no_longer() -> None:
    model = DeploymentView(
        "m", "v1", max_replicas=8, target_inflight=10, standby=Standby(3), demand=Demand(1, last_request_s=1000.0)
    )
    hysteresis, _ = demand_.required(model, Hysteresis(), 1000.0, CONFIG)
    assert hysteresis.replicas == 3
    quiet = replace(model, demand=Demand(0, last_request_s=1000.0))
    hysteresis, _ = demand_.required(quiet, hysteresis, 1000.0 + CONFIG.give_back_at_latest_s - 1, CONFIG)
    assert hysteresis.replicas == 3
    for after_s in (1, 12, 40):
        hysteresis, _ = demand_.required(quiet, hysteresis, 1000.0 + CONFIG.give_back_at_latest_s + after_s, CONFIG)
    assert hysteresis.replicas == 0


def test_a_constant_is_chosen_where_moving_costs_more_than_it_was_foretold() -> None:
    rng, found, restless = random.Random(1), learner(), []
    for look in range(4 * 1800):
        now_s = look * LOOK_S
        # The box moves every ten seconds where the queues ask for none of it, as it does for requests in flight.
        awake = found.best.replicas if found.best.fixed else 3 + int(now_s / 10) % 2
        found.seen(now_s, Seen([0.05] * poisson(rng, 2.4 * LOOK_S / 0.05), awake=awake))
        restless.append(not found.best.fixed)
    assert not any(restless[-4 * 600 :]) and found.best.replicas in (3, 4)


def test_a_constant_is_kept_whatever_is_in_flight() -> None:
    moving = Standby(3)
    fixed = Standby(3, fixed=True)
    model = DeploymentView(
        "m", "v1", max_replicas=8, target_inflight=10, demand=Demand(45, last_request_s=9.0, expected=70.0)
    )
    hysteresis = {
        standby: demand_.required(replace(model, standby=standby), Hysteresis(), 10.0, CONFIG)[0].replicas
        for standby in (moving, fixed)
    }
    assert hysteresis == {moving: 7, fixed: 3}, "neither requests in flight nor a rise move a constant"


@pytest.mark.parametrize("idle_sleep_s", [None, 20.0])
def test_a_constant_ends_with_the_use_of_its_model(idle_sleep_s: float | None) -> None:
    asked = Idle(IdleSettings(idle_sleep_s=idle_sleep_s))
    model = DeploymentView(
        "m", "v1", max_replicas=8, demand=Demand(last_request_s=0.0), standby=Standby(3, fixed=True), idle=asked
    )
    hysteresis, now_s, awake = Hysteresis(replicas=3), 1.0, {}
    while now_s < 2000.0:
        hysteresis, review_s = demand_.required(model, hysteresis, now_s, CONFIG)
        awake[now_s] = hysteresis.replicas
        if review_s is None:
            break
        now_s = review_s
    in_use_s = idle_sleep_s or CONFIG.give_back_at_latest_s
    assert {n for at_s, n in awake.items() if at_s < in_use_s} == {3}
    assert awake[now_s] == 0 and now_s <= in_use_s + CONFIG.give_back_after_s


def test_late_requests_that_no_model_foretold_count_against_as_few_replicas_and_fewer() -> None:
    def after(late: int) -> Standby:
        found = learner()
        for look in range(4 * 600):
            now_s, awake = look * LOOK_S, 3
            found.seen(now_s, Seen([0.05], late=late * (look % 40 == 0), awake=awake))
        return found.best

    assert after(0).replicas == 1, "0.2 replicas of work"
    assert after(1).replicas > 3, "one request in forty was late with three awake, whatever the queues say"


def test_what_cannot_be_in_time_leaves_a_tenth_of_the_allowance() -> None:
    rng, found = random.Random(1), learner(late_share=0.04)
    for look in range(4 * 1800):
        prompts = [3.0 if rng.random() < 0.05 else 0.1 for _ in range(poisson(rng, 0.5))]
        found.seen(look * LOOK_S, Seen(prompts, awake=found.best.replicas))
    assert 1 <= found.best.replicas < 8, "prompts of 3 s are late with eight replicas too"


def test_a_choice_is_left_only_for_one_that_pays_for_the_stop() -> None:
    changes, last = 0, None
    for best in lived(lambda t: 2.4, 30, 5)[1]:
        changes += last is not None and best != last
        last = best
    assert changes <= 6


def test_late_requests_after_a_change_count_against_no_constant_that_would_have_had_more_before() -> None:
    found = learner()
    for look in range(4 * 600):
        # One replica drowns every minute; the second, awake by then, finds what it left.
        second = look % 240 > 20
        found.seen(look * LOOK_S, Seen([0.05], late=3 * (look % 240 == 30), awake=1 + second))
    late = {shadow.choice.replicas: shadow.late for shadow in found._constants}
    assert late[1] > 10 and late[2] == 0


def test_a_constant_that_failed_is_tried_ever_less_often() -> None:
    found, tries = learner(), []
    found._shadows, found._moving, found._early = found._constants, [], found._constants
    for look in range(4 * 3600 * 4):
        now_s, n = look * LOOK_S, found.best.replicas
        # The queues see nothing: requests are late for another reason whenever fewer than three are awake.
        found.seen(now_s, Seen([0.05], late=int(n < 3 and look % 8 == 0), awake=n))
        if n < 3 and (not tries or now_s - tries[-1] > 120):
            tries.append(now_s)
    assert tries and len(tries) <= 8, "after five minutes, ten, twenty, ..."
    assert tries[-1] - tries[-2] > tries[2] - tries[1]


@pytest.mark.parametrize(("late", "failed"), [(8, False), (30, True)])
def test_a_constant_fails_by_more_than_one_burst_that_the_half_hour_has_room_for(late: int, failed: bool) -> None:
    found = learner()
    for look in range(4 * 1800):
        found.seen(look * LOOK_S, Seen([0.05], awake=found.best.replicas))
    assert found._allowed > 40
    found._take(found._constants[0], 1800.0)
    for look in range(40):
        found.seen(1800.0 + look * LOOK_S, Seen([0.05], late=late if look == 39 else 0, awake=1))
    assert found._bars.barred(1, 1810.0) is failed


def test_moving_that_cost_more_than_the_least_constant_in_time_is_barred() -> None:
    found, moved_s = learner(), 0.0
    for look in range(4 * 3600):
        now_s, moving = look * LOOK_S, not found.best.fixed
        # Two would do, and three are awake half of the time whenever the number may move.
        awake = 2 + int(now_s / 20) % 2 if moving else found.best.replicas
        late = int(awake < 2 and look % 4 == 0)
        found.seen(now_s, Seen([0.2] if look % 2 else [], late=late, awake=awake))
        moved_s += moving * LOOK_S
    assert found.best.fixed and found.best.replicas == 2
    assert moved_s < 600, "an hour, of which most stood still"


def test_a_hand_over_that_leaves_few_awake_is_not_a_loss_before_it_can_bring_anything() -> None:
    found = learner()
    found.seen(0.0, Seen([0.05], awake=8))
    for look in range(1, 40):
        found.seen(look * LOOK_S, Seen(awake=2))
        assert not found._bars.barred("moving", look * LOOK_S), "six devices more train in four seconds"


def test_a_stop_costs_a_trial_what_it_costs_the_job_and_one_that_replaces_another_costs_only_its_own() -> None:
    once, twice = Stint(), Stint()
    once.stopped(18.0, 3.0)
    twice.stopped(18.0, 3.0)
    twice.lived(1.0, 6)
    twice.stopped(9.0, 3.0)
    assert (once.gain_s, once.owed_s, twice.gain_s, twice.owed_s) == (0, 18, 0, 9)
    once.lived(10.0, 6)
    twice.lived(10.0, 3)
    assert (once.gain_s, once.owed_s, twice.gain_s, twice.owed_s) == (60 - 18, 0, 30 - 9, 0)


def test_what_was_learned_goes_into_the_state_and_out_of_it() -> None:
    before, _ = lived(lambda t: 8.0 if t % 60 < 2 else 0.1, 10)
    after = learner()
    after.restore(json.loads(json.dumps(before.state())), 5000.0, 0.0)
    assert after.best == before.best and after.state() == before.state() | {"bars": after.state()["bars"]}
    old = learner()
    old.restore(before.state(), 5000.0, 4 * 3600.0)
    assert old.state()["sums"]["_requests"] < 0.01 * before.state()["sums"]["_requests"], "faded meanwhile"
    with pytest.raises(KeyError):
        learner().restore({}, 0.0, 0.0)


def test_until_something_is_known_the_careful_way_is_in_force() -> None:
    found = learner(least=0)
    for look in range(4 * 60):
        # A request every four seconds.
        best = found.seen(look * LOOK_S, Seen([0.05] if look % 16 == 0 else [], awake=1))
        assert (best.replicas, best.backlog_share, best.fixed) == (1, 0.25, False)


@pytest.mark.parametrize(("when_late", "kept"), [("serve", 8), ("split", 4)])
def test_what_all_replicas_cannot_serve_in_time_gets_what_the_box_is_set_to(when_late: WhenLate, kept: int) -> None:
    found = StandbyLearner(
        standby_costs(CONFIG, 8), least=1, most=8, target_s=2.0, late_share=0.01, when_late=when_late
    )

    def lives(minutes: float, requests: int, late: int, from_s: float) -> Standby:
        for look in range(int(minutes * 60 / LOOK_S)):
            awake = found.best.replicas
            seen = Seen([0.5] * requests, load=requests, running=min(requests, 4), awake=awake, late=late)
            found.seen(from_s + look * LOOK_S, seen)
        return found.best

    assert not lives(3, 1, 0, 0.0).replicas == 8
    drowned = lives(5, 8, 8, 180.0)  # sixteen replicas' work
    assert drowned.fixed and drowned.replicas == kept
    assert lives(2, 1, 0, 480.0).replicas == kept, "a pause in it is no end"
    lives(20, 1, 0, 600.0)
    assert not found._overload, "it is over"


def test_until_something_is_known_no_constant_answers_a_burst_that_nothing_serves_in_time() -> None:
    found = learner()
    for look in range(40):
        best = found.seen(look * LOOK_S, Seen([1.5] * 4, load=3.0, running=1.0, awake=found.best.replicas))
        assert not best.fixed, "constants that came and went with each report stopped the job twelve times in a minute"


def test_a_constant_that_is_overrun_with_part_of_its_allowance_spent_gives_way_before_all_is_spent() -> None:
    found = learner()
    for look in range(4 * 2400):
        # A burst a minute, that one replica computes in time and that a moving number would move for.
        found.seen(look * LOOK_S, Seen([0.05] * (25 if look % 240 == 0 else 1), awake=found.best.replicas))
    assert found.best == Standby(1, fixed=True)
    found.seen(2400.0, Seen([0.05], late=int(found._allowed * 0.5), awake=1))
    assert found.best.fixed, "half of what may be late was late: that is what the allowance is for"
    found.seen(2400.25, Seen([0.05] * 30, awake=1))
    assert not found.best.fixed, "1.5 s of prompts wait for one replica"


def test_how_full_replicas_may_be_is_learned_from_what_was_late_without_a_queue() -> None:
    model = DeploymentView(
        "m", "v1", max_replicas=8, target_inflight=10, demand=Demand(inflight=13, last_request_s=9.0)
    )
    found = learner()
    for look in range(40):
        found.seen(look * LOOK_S, Seen([0.05] if look % 4 == 0 else [], load=1.3, awake=2))
    assert demand_.wanted_now(replace(model, standby=found.best), 10.0, CONFIG) == 2
    found.seen(10.0, Seen(load=1.3, late=3, awake=2))
    assert demand_.wanted_now(replace(model, standby=found.best), 10.0, CONFIG) == 3, "two were full at 0.65"
    for look in range(4 * 4 * 3600):
        found.seen(11.0 + look * LOOK_S, Seen(awake=2))
    assert found._full > 0.75, "and is forgotten"


def test_a_constant_that_has_spent_its_allowance_in_a_burst_gives_way_though_moving_is_barred() -> None:
    found = learner()
    for look in range(4 * 2400):
        found.seen(look * LOOK_S, Seen([0.05] * (25 if look % 240 == 0 else 1), awake=found.best.replicas))
    found._bars.failed("moving", 2400.0)
    assert found.best == Standby(1, fixed=True)
    for look in range(20):
        found.seen(2400.0 + look * LOOK_S, Seen([0.05] * 30, awake=1))
        if not found.best.fixed:
            break
    assert not found.best.fixed, "and not two, then three, a hand-over each"


def test_every_static_split_of_a_large_box_is_a_choice() -> None:
    costs = standby_costs(CONFIG, 32)
    found = StandbyLearner(costs, least=1, most=32, target_s=2.0, late_share=0.01)
    constants = {shadow[0].split()[0] for shadow in found.state()["choices"] if shadow[0].endswith("fixed")}
    assert constants == {str(n) for n in range(1, 33)}


def test_prompts_too_long_for_the_target_leave_the_allowance_alone_while_they_are_in_time() -> None:
    spared, spent = (learner() for _ in range(2))
    for look in range(2000):
        now_s = look * LOOK_S
        too_long = [2.5] if look % 50 == 0 else []
        spared.seen(now_s, Seen([0.05, *too_long], awake=1))
        spent.seen(now_s, Seen([0.05, *too_long], hopeless=len(too_long), awake=1))
    assert spared._allowed > 5 * spent._allowed


@pytest.mark.parametrize(("running", "late"), [(0.5, 0), (0.9, 20)])
def test_requests_that_wait_fill_caches_only_where_they_wait_for_room(running: float, late: int) -> None:
    shadow = Shadow(Standby(2, fixed=True), 2.0)
    burst = Seen([0.1] * 20, load=3.0, running=running, awake=1)
    assert shadow.live(10.0, 0.25, burst, 8, standby_costs(CONFIG, 8)) == late, "two compute twenty prompts in a second"


def test_the_only_device_costs_the_job_a_stop_in_both_directions() -> None:
    costs = standby_costs(CONFIG, 1)
    assert costs.stop_s(1) == costs.stop_s(0) == costs.pause_s, "else going there and back for a second seems worth it"


def test_where_nothing_suffices_a_choice_stays_until_another_saves_a_hand_over() -> None:
    found = learner()
    for look in range(4 * 200):
        found.seen(look * LOOK_S, Seen([0.05], late=look % 2, awake=found.best.replicas))
    all_of_them, nearly_all = found._constants[-1], found._moving[6]
    for shadow in found._shadows:
        shadow.late, shadow.cost_s = 1000.0, 500.0
    for shadow, cost_s in ((all_of_them, 1600.0), (nearly_all, 1599.0)):
        shadow.late, shadow.cost_s = 400.0, cost_s
    found._in_force, found._all_late_s, found._overload = all_of_them, -math.inf, False
    found._choose(200.0, 0.0)
    assert found._in_force is all_of_them, "neither suffices, and a second is no reason"
    nearly_all.cost_s = 500.0
    found._choose(200.25, 0.0)
    assert found._in_force is nearly_all
