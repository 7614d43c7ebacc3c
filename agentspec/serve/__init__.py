"""`agentspec serve MODEL`: an OpenAI-compatible server, by SGLang where it is and a GPU, else by LocalEngine.

    local.py      LocalEngine behind the routes: app.py (requests.py, responses.py, trajectories.py), gate.py in front
    launch.py     SGLang with the right options, watched and stopped with all it started

Called by cli. Imports fastapi and uvicorn (the extra `serve`) where they are used.
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.serve.launch import METHODS, SGLangServer, command, installed, serve_sglang, variables

__all__ = ["add_arguments", "run"]

# Options that one of the two has, with the default there. None as given means: not said.
_LOCAL = {
    "max_requests": 64,
    "max_body_mb": 16.0,
    "read_timeout": 60.0,
    "write_timeout": 60.0,
    "kv_gb": None,
    "tool_format": None,
}
_SGLANG = {"draft_model": None, "memory_mb": None, "start_timeout": 1800.0, "sglang": None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="smollm2, a Hugging Face id, a directory or a GGUF file")
    add(
        "--engine",
        choices=("auto", "local", "sglang"),
        default="auto",
        help="auto: sglang where it is installed and a GPU is here",
    )
    add(
        "--method",
        choices=tuple(METHODS),
        default="agentspec",
        help="how to draft; all but agentspec and off need SGLang",
    )
    add("--max-draft", type=int, metavar="N", help="most draft tokens a step (default: 16 here, SGLang's own there)")
    add("--proposer", help="match or mixture: what agentspec drafts with (default: mixture)")
    add("--device", help="cpu, cuda (default: a GPU where there is one)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")
    add("--port", type=int, default=8000, help="0: any free one (default: %(default)s)")
    add("--served-model-name", metavar="NAME", help="what clients call the model (default: MODEL)")
    add("--api-keys", type=Path, metavar="FILE", help="lines `key` or `tenant key`; or one key in AGENTSPEC_API_KEY")
    add("--otlp-endpoint", metavar="URL", help="send spans to this collector (SGLang: its gRPC port)")
    add(
        "--shutdown-timeout",
        type=float,
        default=5.0,
        metavar="S",
        help="for calls under way at the end (default: %(default)s)",
    )
    local = parser.add_argument_group("the embedded engine").add_argument
    local("--max-requests", type=int, metavar="N", help="under way at once; beyond: 429 (default: 64)")
    local("--max-body-mb", type=float, metavar="MB", help="of a request; beyond: 413 (default: 16)")
    local("--read-timeout", type=float, metavar="S", help="for a request to arrive (default: 60)")
    local("--write-timeout", type=float, metavar="S", help="for a client to take what was sent (default: 60)")
    local("--kv-gb", type=float, metavar="GB", help="most keys and values kept (default: a quarter of the memory)")
    local("--tool-format", metavar="NAME", help="how the model writes tool calls (default: as its chat template tells)")
    sglang = parser.add_argument_group("SGLang").add_argument
    sglang(
        "--draft-model",
        metavar="MODEL",
        help="for standalone, eagle, eagle3; mtp where the model has no layer of its own",
    )
    sglang("--memory-mb", type=float, metavar="MB", help="of all trajectory memories (default: the plugin's)")
    sglang("--start-timeout", type=float, metavar="S", help="until SGLang answers (default: 1800)")
    sglang(
        "--sglang", metavar="OPTIONS", help="further options of sglang.launch_server, as one argument: '--tp-size 2'"
    )


def run(args: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM; then 0."""
    if not 0 <= args.port <= 65535:
        raise InvalidRequestError(f"--port: needed 0 to 65535, got {args.port}")
    engine = _engine(args)
    theirs, mine = (_SGLANG, _LOCAL) if engine == "local" else (_LOCAL, _SGLANG)
    for name in theirs:
        if getattr(args, name) is not None:
            raise InvalidRequestError(f"--{name.replace('_', '-')}: --engine {engine} has no such option")
    for name, default in mine.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    return _local(args) if engine == "local" else _sglang(args)


def _engine(args: argparse.Namespace) -> str:
    if args.engine != "auto":
        return str(args.engine)
    if installed() and (args.device is None or args.device.startswith("cuda")):
        import torch

        if torch.cuda.is_available():
            return "sglang"
    return "local"


def _local(args: argparse.Namespace) -> int:
    from agentspec.serve.gate import Limits, keys_of
    from agentspec.serve.local import serve_local

    if args.method not in ("agentspec", "off"):
        raise InvalidRequestError(
            f"--method {args.method}: the embedded engine has agentspec and off; with SGLang on a GPU: --engine sglang"
        )
    if args.method == "off" and args.max_draft:
        raise InvalidRequestError(f"--max-draft {args.max_draft}: nothing is drafted with --method off")
    limits = Limits(
        requests=args.max_requests,
        body_bytes=int(args.max_body_mb * 1e6),
        read_s=args.read_timeout,
        write_s=args.write_timeout,
    )

    def make_engine() -> Any:
        from agentspec.engines.local import LocalEngine

        widest = 0 if args.method == "off" else 16 if args.max_draft is None else args.max_draft
        return LocalEngine(
            args.model,
            device=args.device,
            proposer=args.proposer or "mixture",
            max_draft=widest,
            kv_budget=None if args.kv_gb is None else int(args.kv_gb * 1e9),
            tool_format=args.tool_format,
        )

    return serve_local(
        make_engine,
        host=args.host,
        port=args.port,
        name=args.served_model_name,
        keys=keys_of(args.api_keys, os.environ.get("AGENTSPEC_API_KEY")),
        limits=limits,
        otlp_endpoint=args.otlp_endpoint,
        shutdown_s=args.shutdown_timeout,
    )


def _sglang(args: argparse.Namespace) -> int:
    from agentspec.serve.gate import keys_of
    from agentspec.serve.local import bound

    keys = list(keys_of(args.api_keys, os.environ.get("AGENTSPEC_API_KEY")))
    if len(keys) > 1:
        raise InvalidRequestError(
            "--api-keys: SGLang takes one key; for several tenants put a gateway before it that sets cache_salt"
        )
    with bound(args.host, args.port) as probe:  # SGLang takes no port 0, and says late that one is in use
        port = probe.getsockname()[1]
    words = command(
        args.model,
        host=args.host,
        port=port,
        method=args.method,
        max_draft=args.max_draft,
        draft_model=args.draft_model,
        name=args.served_model_name,
        api_key=keys[0] if keys else None,
        device=args.device,
        otlp_endpoint=args.otlp_endpoint,
        more=shlex.split(args.sglang or ""),
    )
    reached = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(
        args.host, f"[{args.host}]" if ":" in args.host else args.host
    )
    return serve_sglang(
        SGLangServer(
            words,
            variables(args.method, memory_mb=args.memory_mb, proposer=args.proposer),
            f"http://{reached}:{port}",
            args.method,
            keys[0] if keys else None,
            args.start_timeout,
            args.shutdown_timeout,
        )
    )
