"""What a client is told of a request that vLLM cannot read."""

from __future__ import annotations

from vllm.renderers.chat_utils import ChatTemplateResolutionError

from serve.api.request_faults import of_request


def test_a_chat_with_a_model_that_has_no_template_is_told_what_to_do():
    told = str(of_request(ChatTemplateResolutionError("As of transformers v4.44, default chat template is no longer")))
    assert "/v1/completions" in told and "--chat-template FILE" in told and "transformers" not in told
