"""agentspec: makes chains of LLM calls fast without changing what they say.

The public names, each imported when it is first used: `import agentspec` loads no torch, transformers,
langchain or sglang.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name -> the module that has it
_NAMES = {
    "AgentSpecError": "agentspec.errors",
    "CallStats": "agentspec.engines.base",
    "CostCurve": "agentspec.drafting",
    "Draft": "agentspec.drafting",
    "Engine": "agentspec.engines.base",
    "Generation": "agentspec.engines.base",
    "GenerationRequest": "agentspec.engines.base",
    "GenerationResult": "agentspec.engines.base",
    "LocalEngine": "agentspec.engines.local",
    "Proposer": "agentspec.drafting",
    "SGLangEngine": "agentspec.engines.sglang",
    "TokenChunk": "agentspec.engines.base",
    "Trajectory": "agentspec.loop",
    "TrajectoryMemory": "agentspec.memory",
    "agent_loop": "agentspec.loop",
    "current_trajectory": "agentspec.loop",
    "record": "agentspec.recordings",
    "seed": "agentspec.loop",
    "tool": "agentspec.loop",
    "trajectory": "agentspec.loop",
}

__all__ = ["__version__", *_NAMES]

if TYPE_CHECKING:
    from agentspec.drafting import CostCurve, Draft, Proposer
    from agentspec.engines.base import (
        CallStats,
        Engine,
        Generation,
        GenerationRequest,
        GenerationResult,
        TokenChunk,
    )
    from agentspec.engines.local import LocalEngine
    from agentspec.engines.sglang import SGLangEngine
    from agentspec.errors import AgentSpecError
    from agentspec.loop import Trajectory, agent_loop, current_trajectory, seed, tool, trajectory
    from agentspec.memory import TrajectoryMemory
    from agentspec.recordings import record


def __getattr__(name: str) -> Any:
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module 'agentspec' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
