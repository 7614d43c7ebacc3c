"""ChatAgentSpec: a LangChain chat model that runs on an agentspec engine."""
