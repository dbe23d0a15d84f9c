"""The table of training methods: one more row is all that a method needs, from the request to the loss."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from appliance.controller.interfaces.errors import BadRequest
from appliance.controller.jobs import requests
from appliance.controller.models import capacity
from appliance.controller.models.capacity import BoxFacts
from tests.train_support.tiny import make_model_dir
from train.data.chat import ChatEncoder
from train.data.check import check_training_file
from train.data.formats import BadRecord
from train.data.token_set import open_token_set
from train.methods.method import Method
from train.methods.methods import DEFAULT, METHODS, method_of
from train.model.model import load_model, load_tokenizer
from train.plan import auto, estimate
from train.plan.errors import InvalidHyperparameter, InvalidSpec
from train.plan.spec import TrainSpec

DATASET, MODEL = auto.DatasetStats(100, 10_000, 100), auto.ModelStats(10_000_000, 512)


class Preferred(Method):
    """Learns the preferred answer, `strength` times as much; holds a second copy of the weights."""

    name = "dpo"
    metric_names = ("margin",)

    def own_hyperparameters(self, given, fields):
        fields["options"] = {"strength": given.number("strength", 0, 10, auto=2.0)}

    def convert(self, record, shape):
        if shape != "preference":
            raise BadRecord(f"has the shape {shape!r}, no pair")
        return {
            "pair": [
                [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record[side]}]
                for side in ("chosen", "rejected")
            ]
        }

    def refuses(self, shape):
        return None if shape == "preference" else "has no preference pairs"

    def rank_memory(self, shape, fields, ranks):
        held = estimate.rank_memory(shape, fields, ranks)
        return estimate.RankMemory(
            **{name: getattr(held, name) * (2 if name == "weights_bytes" else 1) for name in held.__dataclass_fields__}
        )

    def encode(self, encoder, record):
        return encoder.encode({"messages": record["pair"][0]})

    def objective(self, model, options):
        return Objective(model, options["strength"])

    def batch(self, row, scale, device) -> Any:
        return DEFAULT.batch(row, scale, device)

    def metrics(self, objective):
        margin, objective.margin = objective.margin, 0.0
        return [margin]


class Objective(torch.nn.Module):
    def __init__(self, model, strength):
        super().__init__()
        self.model, self.strength, self.margin = model, strength, 0.0
        self.plain = DEFAULT.objective(model, {})

    def forward(self, batch):
        self.margin += 0.5
        return self.plain(batch) * self.strength


@pytest.fixture
def dpo(monkeypatch):
    monkeypatch.setitem(METHODS, "dpo", Preferred())
    return method_of("dpo")


def body(**changes):
    given = {"model": "m", "training_file": "f"} | changes
    return requests.JobCreate.model_validate(given)


def test_a_request_names_the_method_and_its_hyperparameters(dpo):
    asked = body(method={"type": "dpo", "dpo": {"hyperparameters": {"strength": 3, "n_epochs": 2}}})
    requests.check(asked)
    assert requests.method(asked) is dpo
    given, where = requests.hyperparameters(asked)
    assert where == "method.dpo.hyperparameters"
    fields = dpo.resolve(given, DATASET, MODEL, 2)
    assert (fields["options"], fields["n_epochs"]) == ({"strength": 3.0}, 2)
    with pytest.raises(InvalidHyperparameter, match="strength"):
        dpo.resolve({"strength": 11}, DATASET, MODEL, 2)
    with pytest.raises(InvalidHyperparameter, match="strength"):
        DEFAULT.resolve({"strength": 3}, DATASET, MODEL, 2)
    with pytest.raises(BadRequest, match="method.dpo"):
        requests.hyperparameters(body(method={"type": "dpo", "dpo": {"beta": 1}}))


def test_a_method_is_refused_until_it_is_a_row():
    asked = body(method={"type": "dpo"})
    with pytest.raises(BadRequest, match="The method 'dpo' is not supported yet; 'supervised' is."):
        requests.check(asked)
    with pytest.raises(InvalidSpec, match="'dpo' is not known; expected one of supervised"):
        method_of("dpo")


def test_its_memory_is_planned_with(dpo):
    shape, box = estimate.ModelShape(10**9), BoxFacts(1, "cuda", 80 * 2**30, None, 10**12)
    fields = dpo.resolve({"full": True}, DATASET, auto.ModelStats(10**9, 512), 1)
    plain, double = (capacity.job(shape, fields, (1,), box, method).numbers["device"] for method in (DEFAULT, dpo))
    assert double["weights_bytes"] == 2 * plain["weights_bytes"]
    assert double["device_bytes"] - plain["device_bytes"] == plain["weights_bytes"]


def test_a_small_method_from_its_file_to_its_loss(dpo, tmp_path):
    pairs = [{"prompt": f"What is {n}?", "chosen": f"It is {n}.", "rejected": "No."} for n in range(12)]
    source = tmp_path / "pairs.jsonl"
    source.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    written = tmp_path / "train.jsonl"
    report = check_training_file(source, chat_path=written, convert=dpo.convert)
    assert report.ok and report.shape == "preference" and dpo.refuses(report.shape) is None
    assert DEFAULT.refuses(report.shape) and not check_training_file(source, chat_path=tmp_path / "x").n_errors
    assert not (tmp_path / "x").exists(), "supervised tuning has nothing to train on in it"
    assert orjson.loads(written.read_bytes().splitlines()[3])["pair"][1][1]["content"] == "No."
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"question": "a", "answer": "b"}\n')
    assert "no pair" in check_training_file(chats, convert=dpo.convert).errors[0][1]

    base = make_model_dir(tmp_path / "base", dtype=torch.float32)
    spec = TrainSpec(
        job_id="j",
        base_path=str(base),
        train_path=str(written),
        run_dir="",
        shm_root="",
        output_model="o",
        precision="fp32",
        method="dpo",
        options={"strength": 3.0},
    )
    assert TrainSpec.from_json(spec.to_json()) == spec
    encoder = ChatEncoder(load_tokenizer(str(base)))
    tokens = open_token_set(
        written,
        base,
        lambda: encoder,
        tmp_path / "tokens",
        max_length=64,
        packing=True,
        rank=0,
        world_size=1,
        barrier=lambda: None,
        encode=dpo.encode,
        lay_out=dpo.row,
    )
    assert tokens.n_examples == 12
    row = tokens.row(np.array([0]))
    objective = dpo.objective(load_model(spec), spec.options)
    batch = dpo.batch(row, 1.0, "cpu")
    loss = objective(batch)
    assert loss.item() == pytest.approx(3 * objective.plain(batch).item()) and loss.dtype == torch.float32
    assert dict(zip(dpo.metric_names, dpo.metrics(objective), strict=True)) == {"margin": 0.5}
    assert dpo.metrics(objective) == [0.0]
