"""Fields that clients send and that change nothing here: they are taken and not passed on. The one list of them.

Fields of OpenAI's and Anthropic's own SDKs that engines take, or that are refused by name, are in payload/fields.py; a
test compares both lists with the installed SDK.
"""

from __future__ import annotations

from typing import Final

ACCEPTED: Final[dict[str, dict[str, str]]] = {
    "responses": {"client_metadata": "openai/codex, codex-rs/codex-api/src/common.rs: ResponsesApiRequest"},
}
"""Field -> who sends it, by route."""

INCLUDES: Final = frozenset({"web_search_call.results", "web_search_call.action.sources"})
"""Values of `include` (openai-python, types/responses/response_includable.py) that engines do not know. They add to
items that only OpenAI's own tools make."""
