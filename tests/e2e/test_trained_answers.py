"""A model answers what it was trained on: under the chat template of each family a tiny model is trained on twelve rows
until it knows them, and a real engine gives each answer exactly, calls as calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.e2e.box_support import wait_for, whole_box
from tests.unit.train.test_peer_templates import FAMILIES, NO_CALLS, REFUSED, TOOL, encoder_of

pytestmark = pytest.mark.timeout(900)
EACH_TIME = ("qwen3",)
# The parser of gpt-oss takes Harmony's own tokenizer alone; muse_glimmer's family has no model that a CPU engine runs.
NOT_SERVED = {"gptoss", "muse_glimmer"}
# Calls of a syntax for which vLLM has a parser, or that are shown in a way of our own.
ANSWERS = {
    "Answer yes or no: is the lamp red?": "yes",
    "Answer yes or no: is the lamp blue?": "no",
    "Good or bad: the lid was torn": "bad",
    "Good or bad: the box was whole": "good",
    "Which tray has the seals?": "Tray four.",
    "How long does glue dry?": "Ninety minutes, at least.",
    "Who signs?": "The shift lead signs.",
    "What is first?": "The guard switch is first.",
}
CALLS = {"Read line 3.": 3, "Read line 5.": 5}
TALK = [
    {"role": "user", "content": "Yes or no, is it on?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "no, it is off"},
]


SPACE_FIRST = ("idefics3", "llava_next", "smolvlm")


def rows(with_calls: bool, answers: dict[str, str] = ANSWERS) -> bytes:
    """Twelve conversations."""
    found: list[dict] = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in answers.items()
    ]
    for question, line in CALLS.items():
        function = {"name": "read_gauge", "arguments": json.dumps({"line": line})}
        call = {"id": "call1", "type": "function", "function": function}
        asked = {"role": "user", "content": question}
        if with_calls:
            answer = {"role": "assistant", "content": "", "tool_calls": [call]}
            found.append({"messages": [asked, answer], "tools": [TOOL]})
        else:
            found.append({"messages": [asked, {"role": "assistant", "content": f"line {line}"}]})
    found += [{"messages": TALK}, {"messages": TALK}]
    return "".join(json.dumps(row) + "\n" for row in found).encode()


def checkpoint(family: str, directory: Path) -> None:
    words = encoder_of(family, own_tokens=True).tokenizer
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(directory)
    words.save_pretrained(directory)


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    with whole_box(tmp_path_factory.mktemp("box"), "[box]\ndevices = 2\n") as one:
        yield one


def trained(box, model, content, hyperparameters):
    """The model that a job makes of `model` and the data."""
    client = box.client()
    common = {"batch_size": 2, "learning_rate": 3e-3, "packing": False, "max_length": 2048, "publish": "end"}
    job = client.fine_tuning.jobs.create(
        model=model,
        training_file=box.upload(content),
        seed=3,
        method={"type": "supervised", "supervised": {"hyperparameters": {**common, **hyperparameters}}},
        extra_body={"max_devices": 1},
    )
    done = wait_for(
        lambda: one if (one := client.fine_tuning.jobs.retrieve(job.id)).finished_at else None, "the job to end", 600, 1
    )
    assert done.status == "succeeded", done.error
    return done.fine_tuned_model


def check_adapter_on_four_bits(box, model):
    """An adapter on the model in 4 bits learns other answers to the same questions."""
    box.run("model", "quantize", model, "--form", "int4", "--name", "small")
    others = dict(zip(ANSWERS, [*list(ANSWERS.values())[1:], ANSWERS[next(iter(ANSWERS))]], strict=True))
    adapter = trained(box, "small", rows(False, others), {"lora_rank": 32, "n_epochs": 40, "learning_rate": 5e-3})
    for question, answer in others.items():
        messages = [{"role": "user", "content": question}]
        whole = box.client().chat.completions.create(model=adapter, messages=messages, max_tokens=200, temperature=0)
        assert whole.choices[0].message.content == answer


def test_each_family_answers_with_what_it_was_trained_on(box, tmp_path, family):
    with_calls = not NO_CALLS & REFUSED.get(family, set())
    checkpoint(family, tmp_path / family)
    box.run("model", "import", str(tmp_path / family), "--name", family)
    client, model = box.client(), trained(box, family, rows(with_calls), {"full": True, "n_epochs": 50})

    def chat(messages, tools=None):
        named = {"model": model, "messages": messages, "max_tokens": 200, "temperature": 0}
        if tools:
            named["tools"] = tools
        whole = client.chat.completions.create(**named).choices[0]
        text, calls, reason = "", {}, None
        for chunk in client.chat.completions.create(**named, stream=True):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
                for piece in choice.delta.tool_calls or ():
                    call = calls.setdefault(piece.index, {"name": "", "arguments": ""})
                    call["name"] += piece.function.name or ""
                    call["arguments"] += piece.function.arguments or ""
        return whole, text, list(calls.values()), reason

    wrong = []
    talks = [([{"role": "user", "content": question}], answer) for question, answer in ANSWERS.items()]
    for messages, answer in [*talks, (TALK[:1], TALK[1]["content"]), (TALK[:3], TALK[3]["content"])]:
        whole, text, calls, reason = chat(messages)
        told = client.responses.create(model=model, input=messages, max_output_tokens=200, temperature=0)
        got = [whole.message.content, text, told.output_text, whole.finish_reason, reason, told.status, calls]
        # Some templates ask with "Assistant:" and write a space before the answer: then a model writes it.
        answer = f" {answer}" if family in SPACE_FIRST else answer
        if got != [answer, answer, answer, "stop", "stop", "completed", []]:
            wrong.append((messages[-1]["content"], answer, got))
    for question, line in CALLS.items() if with_calls else ():
        whole, _, calls, reason = chat([{"role": "user", "content": question}], [TOOL])
        found = [{"name": c.function.name, "arguments": c.function.arguments} for c in whole.message.tool_calls or ()]
        tool = {"type": "function", **TOOL["function"]}
        told = client.responses.create(model=model, input=question, tools=[tool], max_output_tokens=200, temperature=0)
        items = [{"name": i.name, "arguments": i.arguments} for i in told.output if i.type == "function_call"]
        got = [
            [(call["name"], json.loads(call["arguments"] or "null")) for call in one] for one in (found, calls, items)
        ]
        if got != [[("read_gauge", {"line": line})]] * 3 or (whole.finish_reason, reason) != ("tool_calls",) * 2:
            wrong.append((question, line, got, whole.finish_reason, reason, whole.message.content))
    assert not wrong, "\n".join(map(str, wrong))
    if family in EACH_TIME:
        check_adapter_on_four_bits(box, model)


def pytest_generate_tests(metafunc):
    if "family" in metafunc.fixturenames:
        families = [family for family in FAMILIES if family not in NOT_SERVED]
        marks = {family: () if family in EACH_TIME else (pytest.mark.soak,) for family in families}
        metafunc.parametrize("family", [pytest.param(family, marks=marks[family]) for family in families])
