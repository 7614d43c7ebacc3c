"""The proposers that ship conform to the protocol, and the kit notices those that don't."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentspec.drafting import Draft, MatchProposer, make_proposer
from agentspec.errors import InvalidRequestError, ProposerError
from agentspec.testing import check_proposer

pytestmark = pytest.mark.fast


def test_match() -> None:
    check_proposer(MatchProposer)


def test_mixture() -> None:
    check_proposer(lambda: make_proposer("mixture", trajectory_bytes=512 * 1024, namespace_bytes=1024 * 1024))


class _Broken(MatchProposer):
    """A proposer with one fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.count = 0

    def propose(self, context: Any, limits: Any) -> Any:
        self.count += 1
        if self.fault == "long":
            return Draft.chain(np.arange(limits.max_tokens + 1))
        if self.fault == "vocabulary" and limits.max_tokens and limits.max_depth:
            return Draft.chain([10**6])
        if self.fault == "none":
            return None
        if self.fault == "probability" and limits.max_depth > 1 and limits.max_tokens > 1:
            return Draft.chain([3, 4], [0.2, 0.9])
        if self.fault == "random" and limits.max_tokens and limits.max_depth:
            return Draft.chain([id(self) // 64 % 400])
        return super().propose(context, limits)


@pytest.mark.parametrize("fault", ["long", "vocabulary", "none", "probability", "random"])
def test_faults_are_noticed(fault: str) -> None:
    made: list[_Broken] = []

    def make() -> _Broken:
        made.append(_Broken(fault))  # kept, so that ids differ
        return made[-1]

    with pytest.raises(ProposerError):
        check_proposer(make)


def test_unknown_name() -> None:
    with pytest.raises(InvalidRequestError, match="mixture"):
        make_proposer("crystal ball")
