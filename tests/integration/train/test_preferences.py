"""DPO, KTO and ORPO match TRL for any split of a step, and reject pairs that cannot be compared."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from torch.nn.functional import logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.integration.train.test_deepspeed_contract import world_of_one  # noqa: F401
from tests.train_support.specs import host_spec, tokenised
from tests.train_support.tiny import gradients, log_probs_of, make_model_dir, write_pair_file
from train.control.rank import Progress
from train.data.chat import ChatEncoder
from train.data.formats import convert
from train.data.packing import build_row
from train.data.records import BadRecord
from train.data.token_set import TokenSet
from train.data_checks.check import check_training_file
from train.methods import packed_objective
from train.methods.methods import METHODS, method_of
from train.methods.packed_objective import LogProbHead, PackedObjective, to_batch
from train.model.model import load_model, load_tokenizer
from train.plan.errors import SnapshotMismatch
from train.trainer import train as training
from train.trainer.worker import _report_data, prepare

DPO, KTO, ORPO = map(method_of, ("dpo", "kto", "orpo"))
# TRL 1.16.0's DPOTrainer on the model and pairs below: batches of four in order, AdamW at 1e-3, beta 0.1.
TRL = [
    # loss, rewards: chosen, rejected, margins; log-probabilities: chosen, rejected; gradient norm
    (0.693147, 0.0, 0.0, 0.0, -16.833351, -128.552231, 4.29877),
    (0.459483, -0.03267, -0.571977, 0.539307, -17.177151, -134.241913, 2.383072),
    (0.342836, -0.049143, -0.943434, 0.894292, -17.482845, -137.890121, 1.805418),
    (0.280219, -0.062767, -1.19186, 1.129093, -17.568506, -140.560867, 1.535459),
    (0.224843, -0.093308, -1.471215, 1.377907, -17.766428, -143.264374, 1.286115),
    (0.186011, -0.090079, -1.677626, 1.587547, -17.751244, -145.298401, 1.091111),
]
RAW = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"


def parity_model(path):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {letter: n + 3 for n, letter in enumerate(letters)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=RAW
    ).save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).float().save_pretrained(path)
    return path


def converted(path, records):
    path.write_text("".join(json.dumps(convert(record).record) + "\n" for record in records))
    return path


def test_dpo_run_matches_trl(tmp_path, monkeypatch):
    records = [
        {"prompt": f"What is {a}+{b}?", "chosen": f" {a + b}", "rejected": f" I cannot add {a} and {b}."}
        for a in range(4)
        for b in range(4)
    ]
    base = parity_model(tmp_path / "base")
    spec = host_spec(
        base,
        train_path=str(tokenised(converted(tmp_path / "t.jsonl", records), base, "dpo")),
        valid_path=str(tmp_path / "t.jsonl"),
        run_dir=str(tmp_path / "run"),
        shm_root=str(tmp_path / "store"),
        method="dpo",
        options={"beta": 0.1},
        n_epochs=2,
        batch_size=4,
        micro_batch=2,
        max_length=64,
        packing=False,
        learning_rate=1e-3,
        precision="fp32",
    )
    monkeypatch.setattr("train.data.packing._shuffled", lambda n_packs, *_: np.arange(n_packs))  # as in the TRL run
    monkeypatch.setattr(training, "learning_rate", lambda *_, **__: 1e-3)
    monkeypatch.setattr("train.trainer.engine.ADAM_BETAS", (0.9, 0.999))
    told = []
    run = prepare(spec, lambda event, **data: told.append({"event": event, **data}), Progress())
    assert run.run()["outcome"] == "succeeded"
    run.metrics.close()
    steps = [event for event in told if event["event"] == "metrics"]
    for step, (loss, chosen, rejected, margin, chosen_logp, rejected_logp, norm) in zip(steps[:6], TRL, strict=True):
        got = [step[key] for key in ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins")]
        assert got == pytest.approx([loss, chosen, rejected, margin], abs=1e-5), step
        # Sums of a hundred float32 values; the norm is rounded to 13 bits (train.state.fragments).
        assert [step["logps/chosen"], step["logps/rejected"]] == pytest.approx([chosen_logp, rejected_logp], abs=1e-4)
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert all(0 <= step["mean_token_accuracy"] <= 1 for step in steps)
    # Accuracy requires a strictly greater reward.
    assert [step["rewards/accuracies"] for step in steps[:2]] == [0.0, 1.0]
    first, *_, last = [event for event in told if event["event"] == "validation"]
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6) and first["rewards/accuracies"] == 0.0
    assert last["loss"] < steps[6]["loss"] and last["rewards/accuracies"] == 1.0
    assert 0 <= last["mean_token_accuracy"] <= 1


def tiny_spec(tmp_path, **fields):
    base = tmp_path / "base"
    base = base if base.exists() else make_model_dir(base, dtype=torch.float32)
    return host_spec(
        base,
        train_path=str(tokenised(write_pair_file(tmp_path / "t.jsonl", 12), base, "dpo")),
        run_dir=str(tmp_path / "run"),
        shm_root=str(tmp_path / "store"),
        method="dpo",
        options={"beta": 0.1},
        batch_size=2,
        max_length=64,
        learning_rate=1e-2,
        precision="fp32",
        **fields,
    )


def silent(event, **data):
    pass


def test_dpo_reference_is_initial_model_and_in_snapshots(tmp_path):
    spec, progress = tiny_spec(tmp_path), Progress()

    def emit(event, **data):
        if event == "metrics" and data["step"] == 2:
            progress.ask_suspend()

    run = prepare(spec, emit, progress)
    left = run.run()
    run.metrics.close()
    assert left["outcome"] == "suspended" and left["step"] >= 2
    (file,) = (tmp_path / "run" / "reference").iterdir()
    reference = run.train.reference
    assert np.array_equal(np.fromfile(file, np.float32), reference.ravel()) and reference.shape == (12, 2)
    objective = PackedObjective(load_model(spec), DPO, spec.options)
    for pack in range(len(run.train.packs)):
        batch = to_batch(run.train.row(np.array([pack])), 1.0, "cpu")
        with torch.no_grad():
            said = objective(batch | {"as_reference": True}).view(-1, 2)
        assert np.allclose(said, reference[run.train.packs[pack]], rtol=1e-6)

    # Lost files come from the snapshot; a snapshot without a reference is rejected.
    file.write_bytes(b"")
    again = prepare(spec, silent, Progress(), left["snapshot_path"])
    assert np.array_equal(again.train.reference, reference)
    again.metrics.close()
    with pytest.raises(SnapshotMismatch):
        again.snapshots._kept["reference.valid"] = torch.zeros(12, 2)
        again.snapshots.read(left["snapshot_path"])


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("rows, held", [(1000, 1000), (3, 1000), (3, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_and_their_gradients_are_exact(monkeypatch, rows, held, dtype, alike):
    monkeypatch.setattr(packed_objective, "HOST_LOGITS_BYTES", 4 * 50 * rows)
    monkeypatch.setattr(packed_objective, "held_rows", lambda n, *_: min(n, held))
    torch.manual_seed(0)
    head = LogProbHead(16, 50, bias=False, dtype=dtype)
    head.alike = alike
    hidden, labels = torch.randn(11, 16, dtype=dtype, requires_grad=True), torch.randint(0, 50, (11,))
    weights = torch.full((11,), 0.3) if alike else torch.randn(11)
    got = head(hidden, labels)
    (got * weights).sum().backward()
    ours = hidden.grad.clone(), head.weight.grad.clone()
    hidden.grad = head.weight.grad = None
    wanted = -functional.cross_entropy(head(hidden).float(), labels, reduction="none")
    with torch.no_grad():
        assert torch.equal(head(hidden, labels), got)
    (wanted * weights).sum().backward()
    assert got.dtype == torch.float32 and torch.allclose(got, wanted, atol=1e-6)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for mine, theirs in zip(ours, (hidden.grad, head.weight.grad), strict=True):
        assert torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance)


def opened(tmp_path, records, max_length):
    base = make_model_dir(tmp_path / "base", dtype=torch.float32)
    data = tokenised(converted(tmp_path / "t.jsonl", records), base, "dpo")
    return TokenSet(data, DPO, max_length=max_length, packing=True), load_tokenizer(str(base))


def test_pair_shares_prompt_and_ends_both_sides(tmp_path):
    tokens, tokenizer = opened(tmp_path, [{"prompt": "how many", "chosen": "all", "rejected": "none of them"}], 64)
    (chosen, learnt), (rejected, other) = tokens._example(0)
    prompt = int(learnt.argmax())
    assert prompt == other.argmax() and (chosen[:prompt] == rejected[:prompt]).all()
    assert tokenizer.decode(chosen[learnt]) == "all<|im_end|>"
    assert tokenizer.decode(rejected[other]) == "none of them<|im_end|>"
    row = tokens.row(np.array([0]))
    assert row.sequence_sizes == (int(learnt.sum()), int(other.sum())) and len(row.segments) == 3  # with the padding


def test_pairs_cut_to_empty_or_equal_outputs_are_dropped(tmp_path):
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    long = {"prompt": "a" * 60, "chosen": "b", "rejected": "c"}
    tokens, _ = opened(tmp_path, [good, long], 48)
    assert (tokens.n_examples, tokens.n_dropped) == (1, 1)
    warnings: list[str] = []
    spec = replace(host_spec(tmp_path), method="dpo", max_length=48)
    _report_data(lambda _, level, text: warnings.extend([text] * (level == "warn")), spec, tokens)
    assert len(warnings) == 1 and "1 were left out" in warnings[0]
    ids, other = np.arange(9, dtype=np.int32), np.arange(1, 10, dtype=np.int32)
    for pair, reason in (([(ids[:4], ids[:4] > 2), (ids, ids > 6)], "non-preferred"), ([(ids, ids > 2)] * 2, "same")):
        with pytest.raises(BadRecord, match=reason):
            DPO.check_cut(pair, 5)
    DPO.check_cut([(ids, ids > 2), (other, ids > 2)], 5)


# -- formulas ----------------------------------------------------------------------------------------------------------


def answers(count, seed=0):
    """Sequences with a prompt of four tokens; every second sequence has its first token marked."""
    draw = np.random.default_rng(seed)
    made = [
        (draw.integers(3, 250, size).astype(np.int32), np.arange(size) >= 4) for size in draw.integers(6, 20, count)
    ]
    for _, learnt in made[::2]:
        learnt[0] = True
    return made


def dpo_of_trl(beta, ratios, kl, means):
    margins = beta * (ratios[::2] - ratios[1::2])
    return -logsigmoid(margins).mean(), {"rewards/margins": margins, "rewards/accuracies": (margins > 0).float()}


def orpo_of_trl(beta, ratios, kl, means):
    """Loss and metrics of TRL's ORPOTrainer.odds_ratio_loss."""
    chosen, rejected = means[::2], means[1::2]
    log_odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    metrics = {"nll_loss": -chosen, "log_odds_chosen": log_odds, "rewards/margins": beta * (chosen - rejected)}
    return -(chosen + beta * logsigmoid(log_odds)).mean(), metrics


def kto_of_trl(beta, ratios, kl, means):
    """Loss and metrics of TRL's KTOTrainer._compute_loss, with matched instead of mismatched pairs."""
    kl = kl.clamp(min=0)
    chosen, rejected = ratios[::2] - kl, kl - ratios[1::2]
    loss = torch.cat((1.5 * (1 - torch.sigmoid(beta * chosen)), 0.5 * (1 - torch.sigmoid(beta * rejected)))).mean()
    return loss, {"kl": kl, "rewards/accuracies": (torch.cat((chosen, rejected)) > 0).float()}


WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.5}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("method", "formula", "shift"),
    [(DPO, dpo_of_trl, 0.0), (ORPO, orpo_of_trl, 0.0), (KTO, kto_of_trl, -2.0), (KTO, kto_of_trl, 2.0)],
    ids=["dpo", "orpo", "kto, kl above 0", "kto, kl clamped"],
)
def test_loss_gradients_and_metrics_match_trl_for_any_split(tmp_path, method, formula, shift, rows):
    model = load_model(host_spec(make_model_dir(tmp_path / "base", dtype=torch.float32), precision="fp32"))
    sequences = answers(6)
    each = [log_probs_of(model, sequence) for sequence in sequences]
    log_probs, means = torch.stack([one.sum() for one in each]), torch.stack([one.mean() for one in each])
    reference = (log_probs + shift + torch.linspace(-1, 1, 6)).detach()
    kl = (log_probs - reference).mean().detach()
    expected, metrics = formula(0.3, log_probs - reference, kl, means)
    expected.backward()
    wanted = gradients(model)

    objective, size, total = PackedObjective(model, method, {"beta": 0.3, **WEIGHTS}), 6 // rows, 0.0
    for start in range(0, 6, size):
        row = build_row([sequences[start : start + size]], 160, 0, packing=True)
        shared = {"reference": reference[start : start + size], "divergence": kl}
        loss = objective(to_batch(row, method.sequences / 6, "cpu") | shared)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(expected.item(), abs=1e-5)
    assert all(torch.allclose(gradient, wanted[name], atol=1e-5) for name, gradient in gradients(model).items())
    found = dict(zip(method.metric_names, objective.take_metrics()[2:], strict=True))
    for name, value in metrics.items():
        assert found[name] == pytest.approx(value.mean().item(), abs=1e-4), name


def test_orpo_of_certain_output_has_finite_gradients():
    log_probs = torch.tensor([0.0, -5.0, -5.0, 0.0], requires_grad=True)
    loss, _ = ORPO.loss(log_probs, {"sequence_sizes": (2, 2, 2, 2)}, {"beta": 0.3})
    loss.backward()
    assert loss.isfinite() and log_probs.grad.isfinite().all()


# -- marked answers ----------------------------------------------------------------------------------------------------

ASK, GOOD = {"role": "user", "content": "2 and 2?"}, {"role": "assistant", "content": "4"}
UNPAIRED = [
    {"prompt": "2 and 2?", "completion": "4", "label": True},
    {"messages": [ASK, GOOD], "label": 1},
    {"conversations": [{"from": "human", "value": "2 and 2?"}, {"from": "gpt", "value": "4"}], "kto_tag": True},
    {"instruction": "2 and 2?", "input": "", "output": "4", "kto_tag": True},
]


@pytest.mark.parametrize("record", UNPAIRED)
def test_marked_answer_shapes_convert_equally(record):
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
def test_marked_answer_with_unclear_label_is_rejected(record):
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
