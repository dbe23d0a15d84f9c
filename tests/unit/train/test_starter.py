"""The starter model end to end, with a handful of steps: what it writes is a checkpoint that transformers loads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.optim import _muon
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from runtime.devices import cuda
from train.starter import main as starter_main
from train.starter.main import least_steps, main, orthogonal, rate_scale, vocabulary_texts
from train.starter.model import ChunkedCrossEntropy, Shape, StarterNet
from train.starter.tokenizer import render

STEPS = 6


def make(out: Path, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "train.starter.main", "--out", str(out), *options],
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("starter")
    words = folder / "words.jsonl"
    words.write_text(json.dumps({"messages": [{"role": "user", "content": "zygomorphic " * 50}]}) + "\n")
    done = make(folder / "model", "--steps", str(STEPS), "--seed", "7", "--vocabulary-text", str(words))
    assert done.returncode == 0, done.stderr
    return folder / "model", [json.loads(line) for line in done.stdout.splitlines()]


def test_the_last_line_reports_what_was_made(starter):
    path, events = starter
    assert events[-1]["event"] == "done" and events[-1]["path"] == str(path)
    assert events[-1]["steps"] == STEPS and events[-1]["tokens"] == STEPS * 2048
    assert 4e6 < events[-1]["parameters"] < 7e6
    fractions = [e["fraction"] for e in events[:-1]]
    assert fractions == sorted(fractions) and {e["stage"] for e in events[:-1]} >= {"tokenizer", "save"}


def test_a_few_steps_already_lower_the_loss(starter):
    _, events = starter
    uniform = torch.log(torch.tensor(4096.0)).item()
    assert events[-1]["validation_loss"] < uniform - 1.5


def test_the_same_seed_gives_the_same_bytes(starter, tmp_path, monkeypatch):
    path, _ = starter
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", _muon._zeropower_via_newtonschulz)  # which it replaces
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    options = ("--steps", str(STEPS), "--seed", "7", "--vocabulary-text", str(path.parent / "words.jsonl"))
    assert main(["--out", str(tmp_path / "again"), *options]) == 0, "in this process, where much was imported before"
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (path / name).read_bytes()


def test_transformers_loads_it_and_finds_the_end_token(starter):
    path, _ = starter
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.config.head_dim == 64 and model.dtype == torch.bfloat16
    assert tokenizer.eos_token == "<|im_end|>" and model.generation_config.eos_token_id[0] == tokenizer.eos_token_id
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert output.shape[1] > prompt["input_ids"].shape[1]


def test_the_chat_template_renders_what_the_model_was_trained_on_and_marks_the_assistant(starter):
    path, _ = starter
    tokenizer = AutoTokenizer.from_pretrained(path)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "Hello, you."},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Goodbye."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text + "<|endoftext|>" == render(messages)
    encoded = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    kept = [t for t, keep in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if keep]
    assert tokenizer.decode(kept) == "Hello, you.<|im_end|>Goodbye.<|im_end|>"


def test_the_chat_template_shows_tools_and_their_calls(starter):
    path, _ = starter
    tokenizer = AutoTokenizer.from_pretrained(path)
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nBe kind.\nYou may call these tools:\n{")
    assert text.count("<|im_start|>system") == 1
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>' in text
    assert text.endswith("<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n")


def test_vocabulary_text_shapes_the_vocabulary_and_digits_stay_single(starter):
    path, _ = starter
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    assert len(tokenizer.encode(" zygomorphic").ids) == 1
    assert [tokenizer.decode([i]) for i in tokenizer.encode("4096").ids] == ["4", "0", "9", "6"]
    strange = "naïve 🦊 \x00\t\r\n ½"
    assert tokenizer.decode(tokenizer.encode(strange).ids, skip_special_tokens=False) == strange


def test_the_card_says_what_it_is(starter):
    path, events = starter
    card = (path / "README.md").read_text()
    assert "not a useful assistant" in card and str(events[-1]["validation_loss"]) in card and f"| {STEPS}, " in card


def test_it_is_made_on_the_processors_whatever_else_there_is(tmp_path, monkeypatch):
    """It holds no lease: on a GPU it ran beside the engine or the rank there, which count on all of its memory, or on
    one that was out of use."""

    class Begun(Exception):
        pass

    def begun(*_, device, **__):
        raise Begun(device)

    monkeypatch.setattr(cuda.KIND, "available", lambda: True)
    monkeypatch.setattr(starter_main, "train_tokenizer", lambda *_, **__: None)
    monkeypatch.setattr(starter_main, "pretrain", begun)
    with pytest.raises(Begun, match="^cpu$"):
        main(["--out", str(tmp_path / "model"), "--steps", "1"])


def test_an_existing_directory_is_left_alone(tmp_path, capsys):
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(SystemExit) as refused:
        main(["--out", str(tmp_path), "--steps", "1"])
    assert refused.value.code == 2 and "exists already" in capsys.readouterr().err
    assert (tmp_path / "config.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--minutes", "0"), "above 0"),
        (("--minutes", "nan"), "above 0"),
        (("--steps", "0"), "at least 1"),
        (("--vocabulary-text", "/nowhere/x"), "no such file"),
    ],
)
def test_bad_options_are_named(tmp_path, options, complaint, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["--out", str(tmp_path / "x"), *options])
    assert refused.value.code == 2 and complaint in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


TINY = Shape(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
)


def test_the_net_computes_what_transformers_computes():
    torch.manual_seed(0)
    net = StarterNet(TINY, compute_dtype=torch.float32)
    reference = LlamaForCausalLM(LlamaConfig(**TINY.config(bos=0, eos=1, pad=2)))
    missing, unexpected = reference.load_state_dict(net.state_dict(), strict=False)
    assert not missing and not unexpected
    tokens = torch.randint(0, 96, (3, 20))
    with torch.no_grad():
        torch.testing.assert_close(net.logits(tokens), reference(input_ids=tokens).logits.float(), atol=2e-5, rtol=1e-4)


def test_the_chunked_loss_and_its_gradients_equal_torchs(monkeypatch):
    monkeypatch.setattr(ChunkedCrossEntropy, "ROWS", 7)
    torch.manual_seed(0)
    hidden = torch.randn(25, 8, requires_grad=True)
    weight = torch.randn(50, 8, requires_grad=True)
    targets = torch.randint(0, 50, (25,))
    (3 * ChunkedCrossEntropy.apply(hidden, weight, targets)).backward()
    ours = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    expected = 3 * torch.nn.functional.cross_entropy(hidden @ weight.t(), targets)
    expected.backward()
    torch.testing.assert_close(ours, (hidden.grad, weight.grad))


def test_weights_on_disk_are_the_trained_ones_in_bfloat16(starter):
    path, _ = starter
    tensors = load_file(path / "model.safetensors")
    assert set(tensors) == set(StarterNet(Shape()).state_dict())
    assert all(tensor.dtype == torch.bfloat16 and tensor.isfinite().all() for tensor in tensors.values())


def test_the_rate_warms_up_and_falls():
    rates = [rate_scale(step / 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.02) and max(rates) > 0.95 and rates[100] == pytest.approx(0.02)
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)


def test_a_busy_machine_still_makes_a_model():
    assert least_steps(0.2) == 24 and least_steps(1.5) == 180 and least_steps(0.001) == 10


def test_vocabulary_texts_reads_chats_and_plain_text(tmp_path):
    chat = tmp_path / "a.jsonl"
    chat.write_text(
        json.dumps({"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]})
    )
    plain = tmp_path / "b.txt"
    plain.write_text("three")
    assert list(vocabulary_texts(chat)) == ["one", "two"] and list(vocabulary_texts(plain)) == ["three"]


def test_orthogonal_in_float32_is_torchs_own_in_more_digits():
    torch.manual_seed(0)
    for shape in ((24, 64), (64, 24)):
        gradient = torch.randn(shape)
        settings = ((3.4445, -4.7750, 2.0315), 5, 1e-7)
        ours = orthogonal(gradient, *settings)
        theirs = _muon._zeropower_via_newtonschulz(gradient, *settings).float()
        likeness = torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0)
        assert ours.dtype == torch.float32 and likeness > 0.999
        assert torch.linalg.svdvals(ours).min() > 0.5 and torch.linalg.svdvals(ours).max() < 1.5
