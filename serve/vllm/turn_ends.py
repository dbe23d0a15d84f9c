"""Makes the end of turn of a chat template that was set for one model an end for its engine.

That of the checkpoint's own template is in its generation_config.json since it was imported.
"""

from __future__ import annotations

import logging
from typing import Any

from weights.checkpoint.turns import PROBES, told
from weights.format.tool_template import with_tools

log = logging.getLogger(__name__)


def end_turns_of(llm: Any, template: str) -> None:
    """Every further request ends where `template` ends a turn of the model, too."""
    tokenizer: Any = llm.get_tokenizer()
    fields = llm.input_processor.generation_config_fields
    ids = fields.get("eos_token_id")
    ids = [ids] if isinstance(ids, int) else list(ids or ())
    added = tokenizer.get_added_vocab()
    known = {token for token, number in added.items() if number in (*ids, tokenizer.eos_token_id)}
    rendered = {name: _rendered(tokenizer, str(with_tools(template)), probe) for name, probe in PROBES.items()}
    begins = {tokenizer.bos_token} - {tokenizer.eos_token}
    turns = told(rendered, added.keys() - begins, known)
    fields["eos_token_id"] = [*ids, *(added[token] for token in turns.new)]


def _rendered(tokenizer: Any, template: str, probe: dict[str, Any]) -> str | None:
    given = {"add_generation_prompt": True} | probe
    messages = given.pop("messages")
    try:
        return tokenizer.apply_chat_template(list(messages), chat_template=template, tokenize=False, **given)
    except Exception as error:  # noqa: BLE001 - a template raises whatever it likes, and a request hears of it
        log.debug("the chat template refuses a conversation: %s", error)
        return None
