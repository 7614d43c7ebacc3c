"""The `agentspec` command. Each subcommand lives with its subject: add_arguments(parser) and run(args) -> exit code."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import agentspec
from agentspec.errors import AgentSpecError

__all__ = ["main"]

# command -> (module, one line of help)
_COMMANDS = {
    "demo": ("agentspec.demo", "an agent of nine calls on a real model, plain and with agentspec"),
    "doctor": ("agentspec.doctor", "what is here, what is missing, and the command that mends it"),
    "replay": ("agentspec.replay", "what agentspec would have done on recorded trajectories"),
    "economics": ("agentspec.breakeven", "when drafting pays: expected tokens, speedup, break-even, best k"),
    "serve": ("agentspec.serve", "an OpenAI-compatible server"),
    "trace": ("agentspec.trace", "record a command's spans without a collector, and look at them"),
}


def _parser(command: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agentspec",
        description="Makes chains of LLM calls fast without changing what they say.",
    )
    parser.add_argument("--version", action="version", version=f"agentspec {agentspec.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, text) in _COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == command:  # the others' modules need not be loaded
            importlib.import_module(module).add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0 fine, 1 the command's own verdict, 2 bad input, 130 Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in words if not word.startswith("-")), None)
    args = _parser(command).parse_args(words)
    try:
        return int(importlib.import_module(_COMMANDS[args.command][0]).run(args))
    except AgentSpecError as error:
        print(f"agentspec {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nagentspec {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) is gone; nothing more can be said, and Python would say so at exit.
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
