"""The SGLang plugin: speculative algorithm AGENTSPEC in SGLang's own scheduler."""
