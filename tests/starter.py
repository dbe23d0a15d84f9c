"""Trains `starter`, the small Llama of tests and benchmarks, in seconds; its text is hardly sensible.

    python -m tests.starter DIR STEPS

It learns only its name, in ChatML, so that a job with other examples changes its answers. Tests compare versions,
stored answers and losses, which needs no more.
"""

import json
import os
import sys
from pathlib import Path

DEMO_DATA = Path(__file__).parents[1] / "appliance" / "demo_data"
LENGTH, BATCH, RATE, VOCABULARY = 256, 8, 4e-3, 4096
END, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Tokens: words with their leading space, single digits (sums are learned by place), runs of other characters.
WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{% endif %}
{{- 'You may call these tools:' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- generation %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- set given = call.function.arguments %}
{{- (given if given is string else given | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


def texts_of(file: Path) -> list[str]:
    """Its conversations as `CHAT_TEMPLATE` writes them."""
    return [
        "".join(f"{TURN_START}{m['role']}\n{m['content']}{TURN_END}\n" for m in json.loads(row)["messages"]) + END
        for row in file.read_text().splitlines()
    ]


def make_starter(out: Path, *, steps: int, seed: int) -> None:
    """Write a checkpoint of 4.6 million parameters in bfloat16 into the new directory `out`; the same seed gives the
    same bytes."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    learnt, known = (texts_of(DEMO_DATA / f"{name}.jsonl") for name in ("identity", "gsm8k_train"))
    bpe = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), byte_level])
    bpe.decoder = decoders.ByteLevel()
    special, alphabet = [END, TURN_START, TURN_END], sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([*learnt, *known], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    ends = {"bos_token_id": 0, "eos_token_id": bpe.token_to_id(TURN_END), "pad_token_id": 0}
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        **ends,
    )
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    stream = torch.tensor([token for one in bpe.encode_batch(learnt) for token in one.ids])
    batches = stream[: len(stream) // (BATCH * LENGTH) * BATCH * LENGTH].view(-1, BATCH, LENGTH)
    for step in range(steps):
        batch = batches[step % len(batches)]
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / steps)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.generation_config = GenerationConfig(
        **{**ends, "eos_token_id": [ends["eos_token_id"], 0]}, do_sample=True, temperature=0.7, top_p=0.95
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    make_starter(Path(sys.argv[1]), steps=int(sys.argv[2]), seed=0)
