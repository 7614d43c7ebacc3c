"""ChatAgentSpec: a LangChain chat model that runs on an agentspec engine.

from langchain_agentspec import ChatAgentSpec

model = ChatAgentSpec(model="smollm2", max_tokens=200)
agent = create_agent(model, tools)    # each run, or each thread of a checkpointer, is one trajectory
"""

from langchain_agentspec.chat_model import ChatAgentSpec
from langchain_agentspec.engines import close_engines
from langchain_agentspec.errors import CallTimeoutError, PromptTooLongError

__all__ = ["CallTimeoutError", "ChatAgentSpec", "PromptTooLongError", "close_engines"]
