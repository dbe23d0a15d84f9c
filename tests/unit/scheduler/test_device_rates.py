"""A measured device is compared with its own baseline and with what is published; wrong results are another fault."""

from __future__ import annotations

import pytest

from runtime.devices.published import published
from scheduler.devices.rates import fault_of, judged, state_of

BASELINE = {"from host": 50e9, "products": 700e12}


def measures(found) -> dict[str, str]:
    return {one.measure: one.state for one in found}


def test_a_device_that_reaches_its_baseline_is_sound():
    found = judged({"from host": 48e9, "products": 690e12}, [], BASELINE, {}, on_host=False)
    assert measures(found) == {"results": "ok", "from host": "ok", "products": "ok"}
    assert state_of(found) == "ok" and fault_of(found) is None
    assert found[1].wanted == "47.5 GB/s (95% of its own baseline)"


def test_one_that_lost_more_than_a_twentieth_is_slow_and_may_recover():
    fault = fault_of(judged({"from host": 50e9, "products": 600e12}, [], BASELINE, {}, on_host=False))
    assert fault is not None and fault.may_pass
    assert fault.reason == (
        "is slow by a deep check (products: 600 TFLOP/s, wanted 665 TFLOP/s (95% of its own baseline))"
    )


def test_the_first_measures_are_compared_with_what_is_published():
    found = judged({"from host": 12e9}, [], {}, published("NVIDIA H100 80GB HBM3"), on_host=False)
    assert fault_of(found) is not None and found[1].wanted == "48 GB/s (what is published for it)"
    assert judged({"from host": 12e9}, [], {}, published("a device nobody knows"), on_host=False)[1].state == "ok"


def test_wrong_results_wait_for_a_person_however_fast_they_come():
    fault = fault_of(judged({"from host": 9e12}, ["a product was not exact"], BASELINE, {}, on_host=False))
    assert (
        fault is not None and not fault.may_pass and fault.reason == "does not compute right: a product was not exact"
    )


def test_a_device_of_the_host_is_never_taken_out_of_use_for_what_its_neighbours_do():
    found = judged({"from host": 10e9, "products": 690e12}, [], BASELINE, {}, on_host=True)
    assert measures(found)["from host"] == "warn" and state_of(found) == "warn" and fault_of(found) is None
    assert fault_of(judged({}, ["a product was not exact"], {}, {}, on_host=True)) is not None


@pytest.mark.parametrize(
    ("name", "to_host", "products"),
    [
        ("NVIDIA H100 80GB HBM3", 48e9, 593.4e12),
        ("NVIDIA H100 NVL", 48e9, None),
        ("NVIDIA H100 PCIe", 48e9, None),
        ("NVIDIA H200", 48e9, 593.4e12),
        ("NVIDIA A100-SXM4-80GB", 21e9, 187.2e12),
        ("NVIDIA A100-PCIE-40GB", 21e9, 187.2e12),
        ("logical CPU device", None, None),
    ],
)
def test_published_figures_go_by_the_narrowest_name(name, to_host, products):
    assert published(name).get("to host") == to_host
    assert published(name).get("products") == (None if products is None else pytest.approx(products))


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM-80GB"])
def test_both_names_that_drivers_give_one_form_have_its_figures(name):
    assert published(name)["memory"] == 1_173e9 and published(name)["all-reduce of 8"] == 228e9
