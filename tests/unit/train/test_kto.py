"""KTO computes TRL's formula with a KL term of the whole step, however the step is split."""

import json

import numpy as np
import pytest
import torch

from tests.train_support.specs import host_spec
from tests.train_support.tiny import gradients, log_probs_of, make_model_dir
from tests.unit.train.test_deepspeed_contract import world_of_one  # noqa: F401
from train.data.chat import ChatEncoder
from train.data.check import check_training_file
from train.data.formats import convert
from train.data.packing import build_row
from train.data.records import BadRecord
from train.methods.methods import METHODS, method_of
from train.methods.packed_objective import PackedObjective, to_batch
from train.model.model import load_model, load_tokenizer

KTO = method_of("kto")

OPTIONS = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}
ASK, GOOD = {"role": "user", "content": "2 and 2?"}, {"role": "assistant", "content": "4"}
UNPAIRED = [
    {"prompt": "2 and 2?", "completion": "4", "label": True},
    {"messages": [ASK, GOOD], "label": 1},
    {"conversations": [{"from": "human", "value": "2 and 2?"}, {"from": "gpt", "value": "4"}], "kto_tag": True},
    {"instruction": "2 and 2?", "input": "", "output": "4", "kto_tag": True},
]


def answers(count, seed=0):
    """Sequences whose first token is marked for every second one."""
    draw = np.random.default_rng(seed)
    made = []
    for number, size in enumerate(draw.integers(6, 20, count)):
        learnt = np.arange(size) >= 4
        learnt[0] = number % 2 == 0
        made.append((draw.integers(3, 250, size).astype(np.int32), learnt))
    return made


@pytest.mark.parametrize("shift", [-2.0, 2.0], ids=["kl-above-0", "kl-clamped"])
def test_kto_loss_and_gradients_match_trl(tmp_path, shift):
    model = load_model(host_spec(make_model_dir(tmp_path / "base", dtype=torch.float32), precision="fp32"))
    sequences = answers(6)
    log_probs = torch.stack([log_probs_of(model, sequence).sum() for sequence in sequences])
    reference = (log_probs + shift + torch.linspace(-1, 1, 6)).detach()
    # KTOTrainer._compute_loss, with the matched pairs of the step in place of mismatched ones.
    kl = (log_probs - reference).mean().detach().clamp(min=0)
    ratios = log_probs - reference
    chosen = 1 - torch.sigmoid(OPTIONS["beta"] * (ratios[::2] - kl))
    rejected = 1 - torch.sigmoid(OPTIONS["beta"] * (kl - ratios[1::2]))
    expected = torch.cat((1.5 * chosen, 0.5 * rejected)).mean()
    expected.backward()
    wanted = gradients(model)

    objective, losses = PackedObjective(model, KTO, OPTIONS), []
    rows = [build_row([sequences[n : n + 2]], 64, 0, packing=True) for n in (0, 2, 4)]
    assert all(row.marks == (True, False) for row in rows)
    for n, row in zip((0, 2, 4), rows, strict=True):
        shared = {"reference": reference[n : n + 2], "divergence": (log_probs - reference).mean().detach()}
        losses.append(objective(to_batch(row, 1 / 6, "cpu") | shared))
        losses[-1].backward()
    assert sum(losses).item() == pytest.approx(expected.item(), abs=1e-5)
    assert all(torch.allclose(gradient, wanted[name], atol=1e-5) for name, gradient in gradients(model).items())
    found = dict(zip(KTO.metric_names, objective.take_metrics()[2:], strict=True))
    assert found["kl"] == pytest.approx(kl.item(), abs=1e-4) and (kl > 0) == (shift < 0)
    right = (torch.cat((ratios[::2] - kl, kl - ratios[1::2])) > 0).float().mean().item()
    assert found["rewards/accuracies"] == pytest.approx(right)


@pytest.mark.parametrize("record", UNPAIRED)
def test_marked_answer_every_shape_is_the_same(record):
    expected = {"sequences": [{"messages": [ASK, GOOD | {"weight": 1}]}], "label": True}
    assert convert(record) == ("unpaired", expected, set())
    bad = {key: False if key in ("label", "kto_tag") else value for key, value in record.items()}
    assert convert(bad).record["label"] is False
    assert all(method.refuses("unpaired") for name, method in METHODS.items() if name != "kto")
    assert KTO.refuses("chat") and KTO.refuses("preference")


def test_marked_conversation_trains_last_answer_only():
    record = {"messages": [ASK, GOOD, ASK, GOOD], "label": False}
    made = convert(record).record
    assert [message.get("weight") for message in made["sequences"][0]["messages"]] == [None, 0, None, 1]
    assert not made["label"]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [ASK, GOOD], "label": "good"},
        {"messages": [ASK, GOOD], "label": True, "kto_tag": False},
        {"messages": [ASK, GOOD], "label": True, "is_good": True},
        {"messages": [ASK, GOOD | {"weight": 0}], "label": True},
    ],
)
def test_marked_answer_unclear_is_refused(record):
    with pytest.raises(BadRecord):
        convert(record)


def test_marked_file_is_checked_and_encoded(tmp_path):
    source, written = tmp_path / "t.jsonl", tmp_path / "written.jsonl"
    source.write_text("".join(json.dumps(record | {"source": "x"}) + "\n" for record in UNPAIRED))
    report = check_training_file(source, chat_path=written)
    assert report.ok and report.shape == "unpaired" and report.left_out == {"source": 4}
    assert any("kto" in note for note in report.notes)
    encoder = ChatEncoder(load_tokenizer(str(make_model_dir(tmp_path / "base"))))
    for label in (True, False):
        record = json.loads(written.read_text().splitlines()[0]) | {"label": label}
        (((ids, learnt),),) = KTO.encode(encoder, record)
        assert learnt[0] == label and encoder.tokenizer.decode(ids[1:][learnt[1:]]) == "4<|im_end|>"
