"""A LangChain agent with real tools over files, and what its calls' drafts gained.

    python examples/langchain_agent.py             # SmolLM2 on the CPU: a few minutes
    python examples/langchain_agent.py --compare   # and without drafts: the same text, more time
    python examples/langchain_agent.py --model Qwen/Qwen2.5-1.5B-Instruct --free

SmolLM2 has 135 million parameters and can't plan. So PLAN says which tools come next, and a grammar restricts
each call to them (`tool_choice` as a list of names) or, at the end, to an answer; the arguments are the
model's own. A model that can plan needs none of it: --free leaves it alone.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_agentspec import ChatAgentSpec
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.tools import BaseTool, tool
from pydantic import BaseModel, Field, create_model

FILES = {
    "deploy.md": "Deploying\n\n"
    "Stop the worker, copy the build to /srv/app, run migrate.sh, start the worker.\n"
    "If migrate.sh fails, restore the last backup before you start the worker.\n",
    "backup.md": "Backups\n\nbackup.sh writes /srv/backup/app.tar every night at two. Keep seven of them.\n"
    "To restore the last backup, run restore.sh /srv/backup/app.tar.\n",
    "oncall.md": "On call\n\nAda is on call in even weeks, Grace in odd weeks. Page them when the worker is down.\n",
}
PLAN: list[list[str]] = [
    ["list_files"],
    ["read_file", "word_count"],  # two calls in one message
    ["search"],
    ["read_file", "read_file"],
    ["word_count"],
    ["write_note"],
]
QUESTION = "How do I deploy the app, and what do I do when the migration fails? Read the files, then answer."


class SayProgress(AgentMiddleware):
    """A line on stderr for each model call: on the CPU one takes many seconds."""

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        number = 1 + sum(isinstance(message, AIMessage) for message in request.messages)
        print(f"call {number} ...", end="", file=sys.stderr, flush=True)
        started = time.monotonic()
        answer = handler(request)
        print(f" {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
        return answer


class FollowPlan(AgentMiddleware):
    """Restricts each model call to the plan's next tools, and the last one to an answer."""

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        done = sum(isinstance(message, AIMessage) for message in request.messages)
        # "none" also takes the tools out of the prompt, so the answer's call reuses less of what was read.
        return handler(request.override(tool_choice=PLAN[done] if done < len(PLAN) else "none"))


def tools_over(folder: Path) -> list[BaseTool]:
    """The agent's tools. A path can only be one of the files that are there."""
    names = tuple(sorted(path.name for path in folder.iterdir()))
    of_a_file: type[BaseModel] = create_model("OfAFile", path=(Literal[names], Field(description="the file")))

    @tool
    def list_files() -> str:
        """List the files."""
        return "\n".join(names)

    @tool(args_schema=of_a_file)
    def read_file(path: str) -> str:
        """Read a file."""
        return (folder / path).read_text()

    @tool(args_schema=of_a_file)
    def word_count(path: str) -> str:
        """Count a file's words."""
        return f"{path} has {len((folder / path).read_text().split())} words"

    @tool(response_format="content_and_artifact")
    def search(words: str = Field(max_length=24)) -> tuple[str, str]:
        """Search all files for words."""
        lines = [(n, line) for n in names for line in (folder / n).read_text().splitlines()]
        asked = set(re.findall(r"\w+", words.lower()))
        found = [f"{n}: {line}" for n, line in lines if asked & set(re.findall(r"\w+", line.lower()))]
        # The model is shown three lines; all of them are draft material (the artifact).
        return "\n".join(found[:3]) or "nothing found", "\n".join(found)

    @tool
    def write_note(text: str = Field(max_length=120)) -> str:
        """Write down what matters, in one or two sentences."""
        (folder / "note.txt").write_text(text)
        return f"noted: {text}"

    return [list_files, read_file, word_count, search, write_note]


def run(model: ChatAgentSpec, free: bool = False) -> list[BaseMessage]:
    """One run of the agent over fresh files; all messages."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, text in FILES.items():
            (folder / path).write_text(text)
        agent = create_agent(
            model, tools_over(folder), middleware=[SayProgress(), *([] if free else [FollowPlan()])], name="file-agent"
        )
        asked = {"messages": [HumanMessage(QUESTION)]}
        messages: list[BaseMessage] = agent.invoke(asked, {"recursion_limit": 40})["messages"]
        return messages


def table(messages: list[BaseMessage]) -> str:
    """The run's calls, one a line."""
    lines = ["call  prompt  reused  output  steps  accepted  tokens/step      ms  says"]
    answers = [message for message in messages if isinstance(message, AIMessage)]
    for number, message in enumerate(answers):
        s = message.response_metadata["call_stats"]
        says = ", ".join(f"{c['name']}({', '.join(map(str, c['args'].values()))})" for c in message.tool_calls)
        lines.append(
            f"{number:4}  {s['prompt_tokens']:6}  {s['reused_tokens']:6}  {s['output_tokens']:6}  "
            f"{s['verify_steps']:5}  {s['accepted']:8}  {s['tokens_per_step'] or 0:11.2f}  "
            f"{s['duration_ms']:6.0f}  {' '.join((says or str(message.content)).split())[:60]}"
        )
    trajectories = {m.response_metadata["call_stats"]["trajectory_id"] for m in answers}
    total = sum(m.response_metadata["call_stats"]["duration_ms"] for m in answers)
    return "\n".join([*lines, f"{len(answers)} calls, {total / 1e3:.1f} s, {len(trajectories)} trajectory"])


def said(messages: list[BaseMessage]) -> list[Any]:
    """What the model said: the texts, and the calls without their ids."""
    answers = [message for message in messages if isinstance(message, AIMessage)]
    return [(m.content, [(c["name"], c["args"]) for c in m.tool_calls]) for m in answers]


def main(arguments: list[str] | None = None, **options: Any) -> None:
    """options: more of ChatAgentSpec's (an engine, in the tests)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--compare", action="store_true", help="run again without drafts")
    parser.add_argument("--free", action="store_true", help="no plan: the model decides")
    given = parser.parse_args(arguments)
    options = {"model": given.model, "max_tokens": 200, "temperature": 0, **options}
    drafted = run(ChatAgentSpec(**options), given.free)
    print(table(drafted))
    if given.compare:
        plain = run(ChatAgentSpec(**options, draft=False), given.free)
        print("\nwithout drafts:\n" + table(plain))
        print("\nthe same text:", said(drafted) == said(plain))
        if said(drafted) != said(plain):
            raise SystemExit("the texts differ: please report it")


if __name__ == "__main__":
    main()
