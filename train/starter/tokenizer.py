"""The starter's tokenizer and chat format: byte-level BPE, ChatML roles, one vocabulary entry per digit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

# `{% generation %}` marks what the assistant wrote (its closing token with it), which is what
# `apply_chat_template(..., return_assistant_tokens_mask=True)` of transformers turns into a training mask.
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


def render(document: str | Sequence[dict[str, str]]) -> str:
    """A training document as text: a story as it is, a conversation exactly as `CHAT_TEMPLATE` renders it."""
    if isinstance(document, str):
        return document + END_OF_TEXT
    turns = (f"{TURN_START}{m['role']}\n{m['content']}{TURN_END}\n" for m in document)
    return "".join(turns) + END_OF_TEXT


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Byte-level BPE of at most `vocab_size` entries; every byte is one, so no text is ever unknown."""
    tokenizer = Tokenizer(models.BPE())
    # Words with their leading space, single digits (sums are learned by place), runs of anything else.
    pattern = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_config(max_length: int) -> dict:
    """`tokenizer_config.json` as transformers reads it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
