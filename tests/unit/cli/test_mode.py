"""`appliance mode` with the real control app: floors, schedule and dry run."""

from tests.unit.cli.conftest import ControlledBox


def test_floor_of_all_devices_is_noted_and_a_higher_floor_is_refused(box: ControlledBox):
    assert "training gets none" in box.run("mode", "set", "train", "--floor", "8").stdout
    assert "! The serving floor of 8 keeps all 8 devices" in box.run("mode", "show").stdout
    for line in (("set", "train"), ("schedule", "add", "0 22 * * *", "train"), ("plan", "train")):
        refused = box.run("mode", *line, "--floor", "20")
        assert refused.exit_code == 2 and "serving_floor is 20" in refused.stderr, line


def test_mode_set_split_with_train_auto_sets_policy_auto(box: ControlledBox):
    assert box.json("mode", "set", "split", "--train", "auto")["policy"] == "auto"
    window = box.json("mode", "schedule", "add", "0 22 * * *", "split", "--train", "auto")
    assert (window["policy"], window["train_devices"]) == ("auto", None)
    assert box.json("mode", "plan", "split", "--train", "auto")["policy"] == "auto"
    assert (
        box.run("mode", "set", "split").exit_code == box.run("mode", "set", "serve", "--train", "auto").exit_code == 2
    )


def test_schedule_is_added_listed_and_removed(box: ControlledBox):
    night = box.json("mode", "schedule", "add", "0 22 * * *", "train", "--until", "0 6 * * *", "--tz", "Europe/Berlin")
    assert night["policy"] == "train" and night["until"] == "0 6 * * *"
    noon = box.json(
        "mode", "schedule", "add", "0 12 * * 1-5", "split", "--train", "6", "--for", "1h30m", "--floor", "2"
    )
    assert (noon["train_devices"], noon["for_s"], noon["serving_floor"]) == (6, 5400.0, 2)
    assert [w["id"] for w in box.json("mode", "schedule", "list")["data"]] == [night["id"], noon["id"]]
    listed = box.run("mode", "schedule", "list").stdout
    assert "split" in listed and "1 h 30 min" in listed and "Europe/Berlin" in listed
    assert box.run("mode", "schedule", "remove", night["id"]).stdout.strip() == f"removed {night['id']}"
    assert box.run("mode", "schedule", "remove", night["id"]).exit_code == 3
    assert box.run("mode", "schedule", "add", "22 o'clock", "train").exit_code == 2
