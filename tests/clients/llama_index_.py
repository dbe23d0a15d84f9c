"""https://docs.llamaindex.ai/en/stable/api_reference/llms/openai_like/: OpenAILike with api_base and api_key."""

from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field
from report import BASE_URL, EMBEDDING_MODEL, KEY, MODEL, QUESTION, tried


def llm(tokens=64):
    return OpenAILike(
        model=MODEL,
        api_base=BASE_URL,
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=tokens,
    )


class City(BaseModel):
    """A city."""

    city: str = Field(max_length=12)


def get_weather(city: str) -> str:
    """The weather of a city."""
    return "sunny"


def plain():
    assert llm(8).complete(QUESTION).text


def stream():
    assert "".join(chunk.delta or "" for chunk in llm(8).stream_complete(QUESTION))


def tools():
    answer = llm().predict_and_call([FunctionTool.from_defaults(get_weather)], user_msg=QUESTION, tool_required=True)
    assert answer.sources


def schema():
    assert llm().as_structured_llm(City).complete(QUESTION).raw.city


def embeddings():
    found = OpenAILikeEmbedding(model_name=EMBEDDING_MODEL, api_base=BASE_URL, api_key=KEY)
    assert len(found.get_text_embedding("one")) > 10


tried(plain, stream, tools, schema, embeddings)
