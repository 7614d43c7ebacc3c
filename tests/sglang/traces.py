"""Calls of real trajectories (../shared/traces) as token ids, for the scripted model. The project never
contains them."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.sglang.server import ROOT

FAMILIES = ("tau", "swe", "sql", "bash", "qa", "edit", "toolapi")


@dataclass(frozen=True)
class Call:
    """One model call: prompt and output ids, output with its end token."""

    trajectory: str
    prompt: list[int]
    output: list[int]


def traces_path() -> Path | None:
    """Where the traces lie, or None: $AGENTSPEC_TRACES, else ../shared/traces beside the checkout or above
    it."""
    given = os.environ.get("AGENTSPEC_TRACES")
    candidates = [Path(given)] if given else [p / "shared" / "traces" for p in (ROOT.parent, ROOT.parent.parent)]
    return next((p for p in candidates if (p / "tau.open.jsonl").exists()), None)


def load_calls(tokenizer: Any, family: str, trajectories: int, longest: int = 6000, most_calls: int = 8) -> list[Call]:
    """The calls of a family's first trajectories, ChatML with tool calls as the traces' README says.

    Calls whose prompt and output exceed `longest` tokens end their trajectory.
    """
    path = traces_path()
    assert path is not None
    calls: list[Call] = []
    lines = (path / f"{family}.open.jsonl").read_text().splitlines()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    for line in lines[:trajectories]:
        recorded = json.loads(line)
        context: list[int] = []
        for step in recorded["steps"][:most_calls]:
            for message in step["messages_delta"]:
                context += ids(f"<|im_start|>{message['role']}\n{_text(message)}<|im_end|>\n")
            prompt = context + ids("<|im_start|>assistant\n")
            output = [*ids(_text(step["output"])), end]
            if len(prompt) + len(output) > longest:
                break
            calls.append(Call(recorded["id"], prompt, output))
            context = prompt + output + ids("\n")
    return calls


def _text(message: dict[str, Any]) -> str:
    parts = [message.get("content") or ""]
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments)
        made = json.dumps({"name": function.get("name"), "arguments": arguments})
        parts.append(f"<tool_call>\n{made}\n</tool_call>")
    return "\n".join(p for p in parts if p)
