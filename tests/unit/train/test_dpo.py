"""DPO computes what TRL's DPOTrainer computes, and refuses pairs of which a cut leaves nothing to compare."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.train_support.specs import host_spec
from tests.train_support.tiny import make_model_dir, write_pair_file
from tests.unit.train.test_deepspeed_contract import world_of_one  # noqa: F401
from train.control.rank import Progress
from train.data.chat import ChatEncoder
from train.data.formats import convert
from train.data.records import BadRecord
from train.data.token_set import open_token_set
from train.methods import packed_objective
from train.methods.methods import method_of
from train.methods.packed_objective import LogProbHead, PackedObjective, SummedLogProbHead
from train.model.model import load_model, load_tokenizer
from train.plan.errors import InvalidTrainingData, SnapshotMismatch
from train.trainer import train as training
from train.trainer.worker import prepare

DPO = method_of("dpo")
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


def test_it_computes_what_trl_computes(tmp_path, monkeypatch):
    records = [
        {"prompt": f"What is {a}+{b}?", "chosen": f" {a + b}", "rejected": f" I cannot add {a} and {b}."}
        for a in range(4)
        for b in range(4)
    ]
    spec = host_spec(
        parity_model(tmp_path / "base"),
        train_path=str(converted(tmp_path / "t.jsonl", records)),
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
    monkeypatch.setattr("train.data.packing._shuffled", lambda n_packs, *_: np.arange(n_packs))  # TRL was told not to
    monkeypatch.setattr(training, "learning_rate", lambda *_, **__: 1e-3)
    monkeypatch.setattr("train.trainer.engine.ADAM_BETAS", (0.9, 0.999))
    told = []
    run = prepare(spec, lambda event, **data: told.append({"event": event, **data}), Progress())
    assert run.run()["outcome"] == "succeeded"
    run.close()
    steps = [event for event in told if event["event"] == "metrics"]
    for step, (loss, chosen, rejected, margin, chosen_logp, rejected_logp, norm) in zip(steps[:6], TRL, strict=True):
        got = [step[key] for key in ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins")]
        assert got == pytest.approx([loss, chosen, rejected, margin], abs=1e-5), step
        # Sums of a hundred float32 numbers; the norm is rounded to 13 bits (train.state.fragments).
        assert [step["logps/chosen"], step["logps/rejected"]] == pytest.approx([chosen_logp, rejected_logp], abs=1e-4)
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert all(0 <= step["mean_token_accuracy"] <= 1 for step in steps)
    # Strictly greater: equal rewards are not success.
    assert [step["rewards/accuracies"] for step in steps[:2]] == [0.0, 1.0]
    first, *_, last = [event for event in told if event["event"] == "validation"]
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6) and first["rewards/accuracies"] == 0.0
    assert last["loss"] < steps[6]["loss"] and last["rewards/accuracies"] == 1.0
    assert 0 <= last["mean_token_accuracy"] <= 1


def tiny_spec(tmp_path, **fields):
    base = tmp_path / "base"
    return host_spec(
        base if base.exists() else make_model_dir(base, dtype=torch.float32),
        train_path=str(write_pair_file(tmp_path / "t.jsonl", 12)),
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


def test_the_reference_is_the_starting_model_and_lies_in_snapshots(tmp_path):
    spec, progress = tiny_spec(tmp_path), Progress()

    def emit(event, **data):
        if event == "metrics" and data["step"] == 2:
            progress.ask_suspend()

    run = prepare(spec, emit, progress)
    left = run.run()
    run.close()
    assert left["outcome"] == "suspended" and left["step"] >= 2
    (file,) = (tmp_path / "run" / "reference").iterdir()
    reference = run.train.reference
    assert np.array_equal(np.load(file), reference) and reference.shape == (12, 2)
    objective = PackedObjective(load_model(spec), DPO, spec.options)
    for pack in range(len(run.train.packs)):
        batch = packed_objective.to_batch(run.train.row(np.array([pack])), 1.0, "cpu")
        with torch.no_grad():
            said = objective(batch | {"as_reference": True}).view(-1, 2)
        assert np.allclose(said, reference[run.train.packs[pack]], rtol=1e-6)

    # On a machine without the folder's files they come from the snapshot; a snapshot without them is refused.
    file.unlink()
    again = prepare(spec, silent, Progress(), left["snapshot_path"])
    assert np.array_equal(again.train.reference, reference)
    again.close()
    with pytest.raises(SnapshotMismatch):
        again.snapshots.read(left["snapshot_path"], {"reference.valid": (12, 2)})


@pytest.mark.parametrize("kind", [LogProbHead, SummedLogProbHead])
@pytest.mark.parametrize("rows, held", [(1000, 1000), (3, 1000), (3, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_and_their_gradients_are_exact(monkeypatch, rows, held, dtype, kind):
    monkeypatch.setattr(packed_objective, "HOST_LOGITS_BYTES", 4 * 50 * rows)
    monkeypatch.setattr(packed_objective, "held_rows", lambda n, *_: min(n, held))
    torch.manual_seed(0)
    head = kind(16, 50, bias=False, dtype=dtype)
    hidden, labels = torch.randn(11, 16, dtype=dtype, requires_grad=True), torch.randint(0, 50, (11,))
    weights = torch.full((11,), 0.3) if kind is SummedLogProbHead else torch.randn(11)
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
    encoder = ChatEncoder(load_tokenizer(str(base)))
    tokens = open_token_set(
        converted(tmp_path / "t.jsonl", records),
        base,
        lambda: encoder,
        tmp_path / "tokens",
        DPO,
        max_length=max_length,
        packing=True,
        rank=0,
    )
    return tokens, encoder.tokenizer


def test_a_pair_shares_its_prompt_and_ends_both_sides(tmp_path):
    tokens, tokenizer = opened(tmp_path, [{"prompt": "how many", "chosen": "all", "rejected": "none of them"}], 64)
    (chosen, learnt), (rejected, other) = tokens._example(0)
    prompt = int(learnt.argmax())
    assert prompt == other.argmax() and (chosen[:prompt] == rejected[:prompt]).all()
    assert tokenizer.decode(chosen[learnt]) == "all<|im_end|>"
    assert tokenizer.decode(rejected[other]) == "none of them<|im_end|>"
    row = tokens.row(np.array([0]))
    assert row.sequence_sizes == (int(learnt.sum()), int(other.sum())) and len(row.segments) == 3  # and the padding


def test_pairs_that_a_cut_leaves_without_an_output_are_refused_by_line(tmp_path):
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    long = {"prompt": "a" * 60, "chosen": "b", "rejected": "c"}
    alike = {"prompt": "a", "chosen": "z" * 60 + "1", "rejected": "z" * 60 + "2"}
    with pytest.raises(InvalidTrainingData) as refused:
        opened(tmp_path, [good, long, alike], 48)
    assert [line for line, _ in refused.value.errors] == [2, 3]
    with pytest.raises(BadRecord, match="non-preferred output"):
        ids = np.arange(9, dtype=np.int32)
        DPO.check_cut([(ids[:4], ids[:4] > 2), (ids, ids > 6)], 5)
