"""OpenAI's own client, and agentspec behind it: an agent that reads files by tool calls, streamed.

    agentspec serve smollm2                    # in another terminal
    python examples/openai_client.py

Nothing here knows of agentspec but the line that prints what was gained. The calls are one conversation by what they
say; `extra_body={"session_id": ...}` would name it.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import openai

FILES = {
    "deploy.md": "Stop the worker, copy the build to /srv/app, run migrate.sh, start the worker.",
    "backup.md": "backup.sh writes /srv/backup/app.tar every night at two. Keep seven of them.",
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "The text of a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "enum": list(FILES)}},
                "required": ["path"],
            },
        },
    }
]


def call(client: openai.OpenAI, model: str, messages: list[Any], **options: Any) -> dict[str, Any]:
    """One streamed call; the assistant's message, appended to the messages."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    last: Any = None
    for chunk in client.chat.completions.create(
        model=model, messages=messages, stream=True, temperature=0, max_tokens=60, **options
    ):
        last = chunk
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        for piece in delta.tool_calls or ():
            held = calls.setdefault(
                piece.index,
                {"id": piece.id, "type": "function", "function": {"name": piece.function.name, "arguments": ""}},
            )
            held["function"]["arguments"] += piece.function.arguments or ""
    if calls:
        message["tool_calls"] = list(calls.values())
    messages.append(message)
    gained = last.agentspec
    print(
        f"{gained['output_tokens']} tokens in {gained['verify_steps']} steps, "
        f"{gained['reused_tokens']} of {gained['prompt_tokens']} prompt tokens reused"
    )
    return message


def main(arguments: list[str] | None = None) -> list[Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    given = parser.parse_args(arguments)
    with openai.OpenAI(base_url=given.base_url, api_key=given.api_key) as client:
        model = client.models.list().data[0].id
        messages: list[Any] = [{"role": "system", "content": "You read files and quote them."}]
        for path in FILES:
            messages.append({"role": "user", "content": f"Read {path} and quote it."})
            # A small model has to be told when to call; a large one decides by itself ("auto").
            asked = call(client, model, messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
            for wanted in asked["tool_calls"]:
                name = json.loads(wanted["function"]["arguments"])["path"]
                print(f"  read_file({name})")
                messages.append({"role": "tool", "tool_call_id": wanted["id"], "content": FILES[name]})
            print(f"  {call(client, model, messages, tools=TOOLS, tool_choice='none')['content'][:70]!r}")
    return messages


if __name__ == "__main__":
    main()
