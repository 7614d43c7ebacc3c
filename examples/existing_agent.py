"""An agent that was written for ChatOpenAI, with two lines changed.

    python examples/existing_agent.py

The lines are marked; the rest is as it was: tools, the agent, a checkpointer, streaming token by token.
SmolLM2 answers by itself instead of calling the tool, as a model of its size does; `langchain_agent.py` shows
tool calls.
"""

from __future__ import annotations

import argparse
from typing import Any

from langchain.agents import create_agent
from langchain_agentspec import ChatAgentSpec  # changed: from langchain_openai import ChatOpenAI
from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"It's sunny in {city}."


def build_agent(model: Any) -> Any:
    return create_agent(
        model, [get_weather], system_prompt="You are a helpful assistant.", checkpointer=InMemorySaver()
    )


def main(arguments: list[str] | None = None, **options: Any) -> str:
    """options: more of the model's (an engine, in the tests)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    given = parser.parse_args(arguments)
    options = {"model": given.model, "temperature": 0, "max_tokens": 40, "timeout": 600, **options}

    model = ChatAgentSpec(**options)  # changed: ChatOpenAI(model="gpt-4o-mini", temperature=0, ...)

    agent = build_agent(model)
    config = {"configurable": {"thread_id": "1"}}
    text = ""
    asked = {"messages": [("user", "Hello! What is the weather like in Rome?")]}
    for message, metadata in agent.stream(asked, config, stream_mode="messages"):
        if isinstance(message, AIMessageChunk) and metadata["langgraph_node"] == "model":
            print(message.text, end="", flush=True)
            text += message.text
            if message.usage_metadata:
                print(f"\n{message.usage_metadata}")
    return text


if __name__ == "__main__":
    main()
