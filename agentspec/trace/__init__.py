"""`agentspec trace`: record a command's spans without a collector, and look at them in a terminal or a page.

    agentspec trace record run.json -- python my_agent.py
    agentspec trace show run.json                   # a tree with bars
    agentspec trace show run.json --html run.html   # a page that needs nothing else

The file is OTLP JSON: Jaeger's "Upload" takes it too. Called by cli; imports telemetry's names only.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from agentspec.errors import InvalidRequestError, UnknownOptionError, shown
from agentspec.trace.page import page
from agentspec.trace.reading import read
from agentspec.trace.record import record
from agentspec.trace.tree import legend, tree

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="record|show", required=True)
    recording = actions.add_parser(
        "record",
        help="run a command and write its spans to a file",
        usage="agentspec trace record [--content] [--steps] FILE -- COMMAND ...",
    )
    recording.add_argument("file", type=Path, metavar="FILE", help="where to; OTLP JSON, which Jaeger's upload takes")
    recording.add_argument("--content", action="store_true", help="with messages, tool arguments and results, cut")
    recording.add_argument("--steps", action="store_true", help="with up to 64 verify steps a call: slow, rejected")
    recording.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND", help="e.g. python my_agent.py")
    showing = actions.add_parser("show", help="a recording as a tree with bars, or as a page")
    showing.add_argument("file", type=Path, metavar="FILE", help="OTLP JSON, one object or one a line")
    showing.add_argument("--html", type=Path, metavar="PAGE", help="write a self-contained page instead")
    showing.add_argument("--width", type=int, help="columns (default: the terminal's)")


def run(args: argparse.Namespace) -> int:
    """0; 1 if lines or spans had to be skipped."""
    if args.action == "record":
        command = list(args.words)
        while command[:1] in (["--content"], ["--steps"]):  # after FILE they mean what they mean before it
            setattr(args, command.pop(0)[2:], True)
        if command[:1] == ["--"]:
            del command[0]
        elif command and command[0].startswith("-"):
            raise UnknownOptionError(
                f"trace record: unknown option {shown(command[0])}: known are --content, --steps; "
                "the command comes after them and --, e.g. -- python my_agent.py"
            )
        if not command:
            raise InvalidRequestError("trace record: needed a command after --, e.g. -- python my_agent.py")
        return record(args.file, command, content=args.content, steps=args.steps)
    skipped: list[str] = []

    def report(problem: str) -> None:
        skipped.append(problem)
        print(f"skipped {problem}", file=sys.stderr)

    traces = read(args.file, report)
    if skipped:
        print(f"{len(skipped)} skipped", file=sys.stderr)
    if args.html is not None:
        try:
            args.html.write_text(page(traces, args.file.name), encoding="utf-8")
        except OSError as error:
            raise InvalidRequestError(f"--html {args.html}: can't be written: {error.strerror}") from error
        print(f"{args.html}: {len(traces)} traces, {sum(len(t.calls) for t in traces)} calls")
        return 1 if skipped else 0
    width = args.width or shutil.get_terminal_size((120, 24)).columns
    plain = "utf" not in (sys.stdout.encoding or "").lower()
    if plain and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    print("\n\n".join(tree(trace, width, plain) for trace in traces))
    if words := legend(traces):
        print(f"\n{words}")
    return 1 if skipped else 0
