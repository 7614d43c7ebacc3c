"""The recorded trajectories of ../shared/traces for benchmarks: where they are, and as token ids.

The project reads them where they are and never contains them: $AGENTSPEC_TRACES, or shared/traces beside the
checkout or above it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from agentspec.recordings import Recording, read
from agentspec.replay import Encoder, load_tokenizer

FAMILIES = ("tau", "swe", "sql", "bash", "edit", "qa", "toolapi")


def directory() -> Path | None:
    """Where the traces lie, or None."""
    here = Path(__file__).resolve().parents[1]
    given = os.environ.get("AGENTSPEC_TRACES")
    places = [Path(given)] if given else [parent / "shared" / "traces" for parent in here.parents]
    return next((place for place in places if (place / "tau.open.jsonl").is_file()), None)


def load(families: Any = FAMILIES, limit: int | None = None) -> dict[str, list[Recording]]:
    """The recordings of each family, in file order. Ends the program if there are none."""
    place = directory()
    if place is None:
        sys.exit("no traces: set AGENTSPEC_TRACES to the directory with tau.open.jsonl and its like")
    return {family: read(place / f"{family}.open.jsonl")[:limit] for family in families}


def encoder(tokenizer: str = "smollm2") -> Encoder:
    return Encoder(load_tokenizer(tokenizer))
