"""The table of training methods, and the names of methods and options in requests and commands."""

import argparse

import pytest
from pydantic import ValidationError

from appliance.cli.commands import jobs
from appliance.cli.errors import BadUsage
from appliance.controller.interfaces.errors import BadRequest
from appliance.controller.openai import new_job as requests
from train.methods.methods import DEFAULT, METHODS, method_of
from train.plan import auto
from train.plan.errors import InvalidHyperparameter, InvalidSpec
from train.plan.estimate import ModelShape

DATASET, MODEL = auto.DatasetStats(100, 10_000, 100), auto.ModelStats(ModelShape(10_000_000), 512, device_kind="cpu")


def body(**changes):
    given = {"model": "m", "training_file": "f"} | changes
    return requests.JobCreate.model_validate(given)


def test_training_of_reads_method_and_hyperparameters():
    hyperparameters = {"beta": 0.5, "n_epochs": 2}
    training = requests.training_of(body(method={"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}))
    assert training.method is METHODS["dpo"] and training.where == "method.dpo.hyperparameters"
    fields = training.method.resolve(training.hyperparameters, DATASET, MODEL, 2)
    assert (fields["options"], fields["n_epochs"]) == ({"beta": 0.5}, 2)
    with pytest.raises(InvalidHyperparameter, match="beta"):
        DEFAULT.resolve(hyperparameters, DATASET, MODEL, 2)


def test_unknown_method_is_rejected():
    with pytest.raises(BadRequest, match="echo"):
        requests.training_of(body(method={"type": "echo"}))
    with pytest.raises(ValidationError, match=r"method\.echo"):
        body(method={"type": "dpo", "echo": {}})
    with pytest.raises(InvalidSpec, match="'echo'"):
        method_of("echo")


def given(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for option in jobs.options():
        parser.add_argument(*option.flags, **option.settings)
    return parser.parse_args(words)


def test_commands_have_the_options_of_methods():
    words = ("--beta", "0.5", "--set", "x=[1]", "--set", "y=z")
    assert jobs.hyperparameters(given("--method", "dpo", *words)) == {"beta": 0.5, "x": [1], "y": "z"}
    found = jobs.hyperparameters(given("--method", "dpo", "--beta", "auto", "--lora", "--epochs", "auto"))
    assert found == {"beta": "auto", "full": False, "n_epochs": "auto"}
    for twice in (["--set", "beta=1"], ["--set", "x=1", "--set", "x=2"]):
        with pytest.raises(BadUsage, match="is given twice"):
            jobs.hyperparameters(given("--method", "dpo", "--beta", "0.5", *twice))
    for wrong in (["--epochs", "many"], ["--method", "ehco"]):
        with pytest.raises(SystemExit):
            given(*wrong)


def test_method_options_have_unique_names():
    common: set[str] = set()
    auto.resolve({}, DATASET, MODEL, 1, own=lambda given, fields: common.update(given.read))
    for method in METHODS.values():
        names = [option.name for option in method.options]
        assert len({*names}) == len(names) and common.isdisjoint(names)


@pytest.mark.parametrize(
    ("method", "n", "given", "rate", "n_epochs"),
    [
        ("supervised", 300, {}, 1e-5, 3),
        ("dpo", 300, {}, 5e-7, 3),
        ("dpo", 12, {}, 1e-6, 10),  # otherwise training on 12 pairs has no effect
        ("dpo", 300, {"learning_rate": 1e-5}, 1e-5, 3),
        ("orpo", 300, {}, 5e-6, 3),
    ],
)
def test_resolve_uses_learning_rate_of_method(method, n, given, rate, n_epochs):
    model = auto.ModelStats(ModelShape(7_000_000_000), 4096, device_kind="cpu")
    fields = METHODS[method].resolve({"full": True} | given, auto.DatasetStats(n, 200 * n, 100), model, 1)
    assert (fields["learning_rate"], fields["n_epochs"]) == (pytest.approx(rate), n_epochs)
