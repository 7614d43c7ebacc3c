"""What to propose, and how much of it.

May import: numpy, numba, agentspec.memory. Never torch: the plugin, the local engine and the replay run the
very same proposer.
"""

from agentspec.drafting.economics import CostCurve
from agentspec.drafting.match import MatchProposer
from agentspec.drafting.policy import WidthPolicy
from agentspec.drafting.proposer import Draft, DraftLimits, Proposer, make_proposer

__all__ = [
    "CostCurve",
    "Draft",
    "DraftLimits",
    "MatchProposer",
    "Proposer",
    "WidthPolicy",
    "make_proposer",
]
