"""`appliance power`, and energy where a job is planned or shown."""

from __future__ import annotations

import pytest

from appliance.cli.views import energy_line, limit_line
from appliance.store.objects import jobs
from appliance.store.records import energy, usage
from appliance.store.rows import JobRow
from tests.unit.cli.conftest import ControlledBox


def test_a_box_that_counts_nothing_says_so(box: ControlledBox):
    shown = box.run("power").stdout
    assert "the box sets none" in shown and "energy is not known" in shown


def test_who_has_drawn_how_much(box: ControlledBox):
    def draw() -> None:
        now_s = 1.7e9
        energy.add(box.context.db, {("model", "starter"): (7.2e6, 36000.0), ("idle", ""): (3600.0, 100.0)}, now_s)
        used = {"key": "k", "model": "starter", "version": "v1", "requests": 1, "errors": 0}
        usage.add(box.context.db, [{**used, "prompt_tokens": 2000, "completion_tokens": 0}], now_s)

    box.do(draw)
    lines = box.run("power", "--since", "36500d").stdout.splitlines()
    model = next(line for line in lines if "starter" in line)
    assert model.split() == "model starter 7.2 MJ 10.00 200 3.6 MJ".split()
    nobody = next(line for line in lines if line.startswith("nobody"))
    assert nobody.split() == "nobody 3.6 kJ 0.03 36 -".split()


DRAWN = {"kwh": 1.25}


@pytest.mark.parametrize(
    ("drawn", "says"),
    [
        (None, "not known: the devices of this machine count no energy that the box may read"),
        (
            DRAWN | {"watts_per_device": 700.0, "watts_from": "limit"},
            "1.25 kWh, at 700 W a device, the power limit of the devices, which they do not reach",
        ),
        (
            DRAWN | {"watts_per_device": 412.3, "watts_from": "jobs"},
            "1.25 kWh, at 412 W a device, what jobs like it have drawn here",
        ),
        (
            DRAWN | {"joules_per_step": 720.0, "joules_per_1000_tokens": 1800.0, "metered_share": 0.95},
            "1.25 kWh, 720 J a step, 1.8 kJ per 1,000 tokens, counted for 95% of its time",
        ),
    ],
)
def test_energy_line_has_watts_and_joules(drawn, says):
    assert energy_line(drawn) == says


def test_limit_line_names_the_limit_and_refusals():
    limits = {"set": True, "limit_w": 500.0, "refused": {}}
    assert limit_line(limits) == "500 W a device"
    assert limit_line(limits | {"limit_w": None, "refused": {"n0/1": "no"}}) == "the devices' own; not on n0/1: no"


def test_a_job_that_drew_energy_shows_it(box: ControlledBox):
    job_id = box.do(lambda: _job(box))
    assert "J a step" in box.run("job", "get", job_id).stdout


def _job(box: ControlledBox) -> str:
    row = JobRow(
        id="ftjob-1",
        model="starter",
        method="supervised",
        seed=1,
        training_file="file-1",
        output_model="ft:starter",
        created_s=1.0,
        phase="running",
    )
    jobs.insert(box.context.db, row)
    jobs.update(box.context.db, row.id, step=10)
    energy.add(box.context.db, {("job", row.id): (100.0, 5.0)}, 3600.0)
    return row.id
