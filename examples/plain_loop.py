"""An agent loop without any framework: decorators make it one trajectory.

    python examples/plain_loop.py

@agent_loop: a run of the function is one trajectory, and its runs learn from one another. @tool: what the
function returns is draft material as soon as it returns. The loop reads two files and has the model copy out
what it read, which is what most of an agent's tokens are.
"""

from __future__ import annotations

import argparse
from typing import Any

import agentspec
from agentspec.chat import Grammar

FILES = {
    "deploy.md": "Stop the worker, copy the build to /srv/app, run migrate.sh, start the worker.",
    "backup.md": "backup.sh writes /srv/backup/app.tar every night at two. Keep seven of them.",
}


@agentspec.tool
def read_file(path: str) -> str:
    return FILES[path]


@agentspec.agent_loop(name="copy-agent")
def copy_files(engine: agentspec.Engine, paths: list[str], **options: Any) -> list[dict[str, Any]]:
    """Have the model quote each file; the stats of each call."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You quote files word for word."}]
    for path in paths:
        text = read_file(path)
        messages.append({"role": "user", "content": f"{path} says: {text}\n\nQuote it, from its first word."})
        # A small model wanders off; the grammar holds it to a quotation of at most two lines.
        quoted = Grammar.regex(r"[A-Za-z0-9 ,.:/_-]{20,120}\.")
        result = engine.chat(messages, max_tokens=60, grammar=quoted, **options).result()
        messages.append(result.message)
    current = agentspec.current_trajectory()
    assert current is not None
    for call, message in zip(current.calls, messages[2::2], strict=True):
        print(
            f"call {call.call_index}: {call.output_tokens} tokens in {call.verify_steps} steps, "
            f"{call.accepted} drafted, {call.reused_tokens} of {call.prompt_tokens} prompt tokens reused, "
            f"{call.duration_ms:.0f} ms: {message['content'][:50]!r}"
        )
    return messages


def main(arguments: list[str] | None = None, engine: Any = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    given = parser.parse_args(arguments)
    if engine is not None:
        return copy_files(engine, list(FILES))
    with agentspec.LocalEngine(given.model) as made:
        return copy_files(made, list(FILES))


if __name__ == "__main__":
    main()
