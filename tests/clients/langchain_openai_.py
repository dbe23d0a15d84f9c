"""https://docs.langchain.com/oss/python/integrations/chat/openai: ChatOpenAI has base_url and api_key."""

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field
from report import EMBEDDING_MODEL, MODEL, QUESTION, tried

llm = ChatOpenAI(model=MODEL, max_tokens=64)


class City(BaseModel):
    """A city."""

    city: str = Field(max_length=12)


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return "sunny"


def plain():
    answer = llm.invoke(QUESTION, max_tokens=10)
    assert answer.content and answer.usage_metadata["output_tokens"] > 0


def stream():
    assert "".join(chunk.content for chunk in llm.stream(QUESTION, max_tokens=8))


def tools():
    answer = llm.bind_tools([get_weather], tool_choice="required").invoke(QUESTION)
    assert answer.tool_calls[0]["name"] == "get_weather"
    told = create_agent(llm.bind(max_tokens=10), tools=[get_weather]).invoke({"messages": [("user", QUESTION)]})
    assert len(told["messages"]) >= 2


def schema():
    assert llm.with_structured_output(City).invoke(QUESTION).city
    assert llm.with_structured_output(City, method="function_calling").invoke(QUESTION).city


def responses():
    answer = ChatOpenAI(model=MODEL, max_tokens=16, use_responses_api=True).invoke(QUESTION)
    assert answer.text


def logprobs():
    answer = llm.bind(logprobs=True, top_logprobs=2).invoke(QUESTION, max_tokens=3)
    assert answer.response_metadata["logprobs"]["content"]


def embeddings():
    # check_embedding_ctx_length=False: documented for endpoints other than OpenAI
    found = OpenAIEmbeddings(model=EMBEDDING_MODEL, check_embedding_ctx_length=False).embed_documents(["one", "two"])
    assert len(found) == 2


tried(plain, stream, tools, schema, responses, logprobs, embeddings)
