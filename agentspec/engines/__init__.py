"""Who runs the target model: the Engine protocol, the embedded LocalEngine, SGLang.

May import: everything below (chat, drafting, memory, loop, telemetry), torch and transformers where they are used.
"""
