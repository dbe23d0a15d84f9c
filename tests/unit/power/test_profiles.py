"""Which profile holds when, what a mistake in [power] is told, and what energy costs."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from appliance.power import cost
from appliance.power.profiles import Profile
from appliance.power.settings import PowerSettings

SETTINGS = PowerSettings(
    profiles={"quiet": {"limit_w": 300}, "night": {"limit_w": 500, "clock_mhz": 1410}},
    by_mode={"serve": "quiet"},
    by_clock={"22:00-06:00": "night", "05:00-08:00": "off"},
)


@pytest.mark.parametrize(
    ("mode", "hour", "minute", "profile", "because"),
    [
        ("serve", 12, 0, Profile("quiet", 300.0), "the mode: serve"),
        ("train", 12, 0, Profile("off"), "the mode: train"),
        ("train", 21, 59, Profile("off"), "the mode: train"),
        ("serve", 22, 0, Profile("night", 500.0, 1410), "the clock: 22:00-06:00"),
        ("serve", 0, 0, Profile("night", 500.0, 1410), "the clock: 22:00-06:00"),
        ("serve", 5, 59, Profile("night", 500.0, 1410), "the clock: 22:00-06:00"),
        ("serve", 6, 0, Profile("off"), "the clock: 05:00-08:00"),
        ("serve", 8, 0, Profile("quiet", 300.0), "the mode: serve"),
    ],
)
def test_the_clock_goes_before_the_mode(mode, hour, minute, profile, because):
    assert SETTINGS.wanted(mode, hour * 60 + minute) == (profile, because)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"profiles": {"a": {}}}, "is empty"),
        ({"profiles": {"a": {"watts": 3}}}, "has 'watts'; expected limit_w or clock_mhz"),
        ({"profiles": {"a": {"limit_w": 0}}}, "not above 0"),
        ({"profiles": {"off": {"limit_w": 3}}}, "another name"),
        ({"by_mode": {"serve": "a"}}, "no profile 'a'; there are off"),
        ({"by_mode": {"sleep": "off"}}, "expected serve, train, split, auto"),
        ({"by_clock": {"22-06": "off"}}, "such as 22:00-06:00"),
        ({"by_clock": {"24:00-06:00": "off"}}, "such as 22:00-06:00"),
        ({"by_clock": {"06:00-06:00": "off"}}, "no time at all"),
        ({"pue": 0.5}, "greater than or equal to 1"),
    ],
)
def test_a_mistake_is_told(wrong, says):
    with pytest.raises(ValidationError, match=says):
        PowerSettings(**wrong)


def test_the_bill_counts_the_rest_of_the_machine_and_of_the_site():
    dear = PowerSettings(price_per_kwh=0.3, currency="USD", pue=1.5, rest_w_per_device=100)
    # Two devices at 300 W for an hour, with 100 W each for the rest.
    assert cost.bill(dear, 2 * 300 * 3600, 2 * 3600) == {
        "device_kwh": pytest.approx(0.6),
        "site_kwh": pytest.approx(1.2),
        "cost": pytest.approx(0.36),
        "currency": "USD",
    }
    assert cost.bill(PowerSettings(), 3.6e6, 0)["cost"] is None
