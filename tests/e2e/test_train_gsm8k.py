"""Real data that nobody here wrote, from the uploaded file to a version that can be served."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.train_support.tiny import gsm8k, make_model_dir
from train.data.check import check_training_file
from train.plan.auto import DatasetStats, ModelStats, resolve
from train.plan.spec import TrainSpec


@pytest.mark.soak  # test_box.py trains on shorter examples of it
async def test_gsm8k_from_upload_to_published_version(shop, tmp_path):
    reports = {}
    for split, count in (("train", 48), ("test", 8)):
        source = gsm8k(tmp_path / f"{split}.jsonl", split, count)
        reports[split] = check_training_file(source, chat_path=tmp_path / f"{split}.chat.jsonl")
        assert reports[split].ok and reports[split].n_examples == count
    train = reports["train"]
    fields = resolve(
        {"n_epochs": 2, "batch_size": 4, "learning_rate": 3e-3, "max_length": 512, "learning_rate_multiplier": "auto"},
        DatasetStats(train.n_examples, train.n_tokens_estimate, train.longest_example_tokens),
        ModelStats(100_000, 512, device_kind="cpu"),
        max_devices=4,
    )
    base = make_model_dir(tmp_path / "base")
    spec = TrainSpec(
        job_id="gsm8k",
        base_path=str(base),
        train_path=str(tmp_path / "train.chat.jsonl"),
        valid_path=str(tmp_path / "test.chat.jsonl"),
        run_dir=str(tmp_path / "run"),
        shm_root=str(shop.shm / "store"),
        output_model="ft:base::gsm8k",
        seed=1,
        **fields,
        device_kind="cpu",
    )
    world = await shop.run(spec, 2)

    first, *_, last = world.of("validation")
    assert first["step"] == 0 and last["step"] == world.of("metrics")[-1]["step"]
    assert last["loss"] < 0.75 * first["loss"], (first, last)
    assert all(event["devices"] == 2 and event["tokens_per_s"] > 0 for event in world.of("metrics"))
    assert world.of("started")[0]["devices"] == 2
    assert list((Path(spec.run_dir) / "tb").glob("events.out.tfevents.*"))
    assert [event["text"] for event in world.of("message")][0].startswith("48 examples")

    stored = shop.store.find("version", "ft:base::gsm8k", f"step-{last['step']}")
    tuned, tokenizer = AutoModelForCausalLM.from_pretrained(stored.path), AutoTokenizer.from_pretrained(stored.path)
    question = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 + 2?"}],
        return_tensors="pt",
        add_generation_prompt=True,
        return_dict=True,
    )
    answers = [
        model.generate(**question, max_new_tokens=8, do_sample=False)[0].tolist()
        for model in (tuned, AutoModelForCausalLM.from_pretrained(base))
    ]
    assert answers[0] != answers[1], "the tuned model answers otherwise than its base"
