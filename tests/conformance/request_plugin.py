"""Pytest plugin for openai-python's tests of inference: adds the fields that their requests for responses lack. They
send no model and no input, because OpenAI takes both from a stored prompt. A box must not guess a model, so this plugin
adds them in the SDK's own client, just before a request is sent.
"""

from typing import Any

from openai import _base_client

LEFT_OUT = {"model": "gpt-6-astra", "input": "Say hello."}


def pytest_configure() -> None:
    build = _base_client.BaseClient._build_request

    def with_missing_fields(self: Any, options: Any, **kwargs: Any) -> Any:
        if options.method.lower() == "post" and options.url in ("/responses", "/responses/input_tokens"):
            options.json_data = {**LEFT_OUT, **(options.json_data or {})}
        return build(self, options, **kwargs)

    _base_client.BaseClient._build_request = with_missing_fields  # type: ignore[method-assign]
