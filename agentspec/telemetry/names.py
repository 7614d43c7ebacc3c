"""Every span attribute, metric and event name that agentspec writes, in one table with its source.

The GenAI conventions are still moving (they left OpenTelemetry's main repository in 2026, and their metrics
are being renamed there), so a name is spelled here and nowhere else. Imports nothing. Read by the other
telemetry modules, `agentspec trace`, and the tests, which hold the conventional names against the installed
opentelemetry-semantic-conventions and every written attribute against this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ATTRIBUTES", "METRICS", "Attribute", "Metric"]

Kind = Literal["str", "int", "float", "bool", "str[]"]

# Sources. opentelemetry-semantic-conventions 0.66b2 has the names (opentelemetry.semconv._incubating); what
# they
# mean is in the repository semantic-conventions-genai, under docs/gen-ai.
INFERENCE = "semantic-conventions-genai: client-inference.md"
AGENT = "semantic-conventions-genai: gen-ai-agent-spans.md"
GENAI_METRICS = "semantic-conventions-genai: gen-ai-metrics.md"
GENERAL = "semantic-conventions: attributes"
OURS = "agentspec: DESIGN's words"


@dataclass(slots=True, frozen=True)
class Attribute:
    """A span (or event) attribute. A key that ends in ".*" stands for one key for each value of a set."""

    key: str
    kind: Kind
    source: str
    meaning: str


@dataclass(slots=True, frozen=True)
class Metric:
    """An instrument. buckets: explicit boundaries, as the convention gives them."""

    name: str
    instrument: Literal["histogram", "counter", "gauge"]
    unit: str
    source: str
    meaning: str
    buckets: tuple[float, ...] = ()


ATTRIBUTES: dict[str, Attribute] = {}
METRICS: dict[str, Metric] = {}


def _attribute(key: str, kind: Kind, source: str, meaning: str) -> str:
    ATTRIBUTES[key] = Attribute(key, kind, source, meaning)
    return key


def _family(prefix: str, kind: Kind, source: str, meaning: str) -> str:
    ATTRIBUTES[prefix + ".*"] = Attribute(prefix + ".*", kind, source, meaning)
    return prefix


def _metric(
    name: str,
    instrument: Literal["histogram", "counter", "gauge"],
    unit: str,
    source: str,
    meaning: str,
    buckets: tuple[float, ...] = (),
) -> Metric:
    METRICS[name] = Metric(name, instrument, unit, source, meaning, buckets)
    return METRICS[name]


def known(key: str) -> Attribute | None:
    """The table's entry for a written key, also where it stands for a family."""
    entry = ATTRIBUTES.get(key)
    while entry is None and "." in key:
        key = key.rpartition(".")[0]
        entry = ATTRIBUTES.get(key + ".*")
    return entry


# ---- conventional: what is run, by whom ------------------------------------------------------------

OPERATION = _attribute("gen_ai.operation.name", "str", INFERENCE, "chat, invoke_agent or execute_tool")
PROVIDER = _attribute("gen_ai.provider.name", "str", INFERENCE, "agentspec (embedded engine) or sglang")
AGENT_NAME = _attribute("gen_ai.agent.name", "str", AGENT, "the @agent_loop's or trajectory's name")
CONVERSATION = _attribute("gen_ai.conversation.id", "str", INFERENCE, "the trajectory's id")
TOOL_NAME = _attribute("gen_ai.tool.name", "str", AGENT, "the @tool's name")
TOOL_TYPE = _attribute("gen_ai.tool.type", "str", AGENT, "function")
TOOL_DESCRIPTION = _attribute("gen_ai.tool.description", "str", AGENT, "the first line of its docstring")
ERROR_TYPE = _attribute("error.type", "str", GENERAL, "the exception's class")
SERVER_ADDRESS = _attribute("server.address", "str", GENERAL, "the remote engine's host")
SERVER_PORT = _attribute("server.port", "int", GENERAL, "the remote engine's port")

# ---- conventional: the request and the response ------------------------------------------------------------

REQUEST_MODEL = _attribute("gen_ai.request.model", "str", INFERENCE, "the model asked for")
RESPONSE_MODEL = _attribute("gen_ai.response.model", "str", INFERENCE, "the model that answered")
STREAM = _attribute("gen_ai.request.stream", "bool", INFERENCE, "always: calls arrive step by step")
MAX_TOKENS = _attribute("gen_ai.request.max_tokens", "int", INFERENCE, "max_tokens")
TEMPERATURE = _attribute("gen_ai.request.temperature", "float", INFERENCE, "temperature; 0: greedy")
CHOICES = _attribute("gen_ai.request.choice.count", "int", INFERENCE, "n, where it isn't 1")
TOP_P = _attribute("gen_ai.request.top_p", "float", INFERENCE, "top_p")
TOP_K = _attribute("gen_ai.request.top_k", "int", INFERENCE, "top_k")
SEED = _attribute("gen_ai.request.seed", "int", INFERENCE, "the sampling seed")
STOP = _attribute("gen_ai.request.stop_sequences", "str[]", INFERENCE, "stop strings")
PRESENCE_PENALTY = _attribute("gen_ai.request.presence_penalty", "float", INFERENCE, "presence_penalty")
FREQUENCY_PENALTY = _attribute("gen_ai.request.frequency_penalty", "float", INFERENCE, "frequency_penalty")
FINISH_REASONS = _attribute("gen_ai.response.finish_reasons", "str[]", INFERENCE, "[stop], [length] or [abort]")
FIRST_CHUNK = _attribute("gen_ai.response.time_to_first_chunk", "float", INFERENCE, "s, queueing included")
INPUT_TOKENS = _attribute("gen_ai.usage.input_tokens", "int", INFERENCE, "prompt tokens, reused ones included")
OUTPUT_TOKENS = _attribute("gen_ai.usage.output_tokens", "int", INFERENCE, "output tokens, EOS included")
CACHE_READ = _attribute("gen_ai.usage.cache_read.input_tokens", "int", INFERENCE, "prompt tokens with KV at hand")
INPUT_MESSAGES = _attribute("gen_ai.input.messages", "str", INFERENCE, "JSON; on opt-in only, cut")
OUTPUT_MESSAGES = _attribute("gen_ai.output.messages", "str", INFERENCE, "JSON; on opt-in only, cut")
TOOL_ARGUMENTS = _attribute("gen_ai.tool.call.arguments", "str", AGENT, "JSON; on opt-in only, cut")
TOOL_RESULT = _attribute("gen_ai.tool.call.result", "str", AGENT, "on opt-in only, cut")
TOKEN_TYPE = _attribute("gen_ai.token.type", "str", GENAI_METRICS, "metrics only: input or output")

# ---- ours, on chat spans ------------------------------------------------------------

CALL_INDEX = _attribute("agentspec.call.index", "int", OURS, "this call's number in its trajectory, from 0")
ENGINE = _attribute("agentspec.engine", "str", OURS, "local or sglang")
ABANDONED = _attribute("agentspec.abandoned", "bool", OURS, "its consumer left before the end")
QUEUE_MS = _attribute("agentspec.queue_ms", "float", OURS, "waiting for the engine, ms")
PREFILL_MS = _attribute("agentspec.first_token_ms", "float", OURS, "from the request to its first token, ms")
REUSED = _attribute("agentspec.reused_tokens", "int", OURS, "prompt tokens whose KV was there already")
DIVERGENCE = _attribute("agentspec.first_divergence", "int", OURS, "first prompt position unlike the last context")
SPLICED = _attribute("agentspec.spliced_tokens", "int", OURS, "prompt tokens taken over as generated")
ITL_MEAN = _attribute("agentspec.itl.mean_ms", "float", OURS, "(last - first arrival) / (tokens - 1), ms")
ITL_TOKEN = _family("agentspec.itl.token", "float", OURS, "gap per token: mean_ms, p50_ms, p95_ms, max_ms")
ITL_ARRIVAL = _family("agentspec.itl.arrival", "float", OURS, "gap per arrival: mean_ms, p50_ms, p95_ms, max_ms")
STEPS = _attribute("agentspec.verify_steps", "int", OURS, "forward passes that emitted tokens")
TOKENS_PER_STEP = _attribute("agentspec.tokens_per_step", "float", OURS, "output tokens / verify steps")
PROPOSED = _attribute("agentspec.proposed", "int", OURS, "draft tokens sent to verification")
ACCEPTED = _attribute("agentspec.accepted", "int", OURS, "draft tokens emitted")
ACCEPTANCE = _attribute("agentspec.acceptance_rate", "float", OURS, "accepted / proposed")
ACCEPTANCE_BAND = _attribute(
    "agentspec.acceptance_band",
    "str",
    OURS,
    "acceptance_rate in fifths, or none: Jaeger searches equal values only",
)
CONDITIONAL = _attribute("agentspec.conditional_acceptance", "float", OURS, "accepted / (accepted + first mismatches)")
BY_SOURCE = _family("agentspec.accepted_from", "int", OURS, "accepted tokens by the memory's source")
MEAN_WIDTH = _attribute("agentspec.mean_width", "float", OURS, "draft tokens a step")
DEPTH = _attribute("agentspec.proposed_depth", "int", OURS, "sum over steps of the draft's longest path")
NO_DRAFT = _attribute("agentspec.no_draft", "bool", OURS, "no draft token was proposed in this call")
NOT_DRAFTED = _family("agentspec.not_drafted", "int", OURS, "steps without a draft, by reason")
PROPOSER_SHARE = _attribute("agentspec.proposer_share", "float", OURS, "proposer time / (proposer + forward time)")
PROPOSER_MS = _attribute("agentspec.proposer_ms", "float", OURS, "time in the proposer, ms")
FORWARD_MS = _attribute("agentspec.forward_ms", "float", OURS, "time in the model's forwards, ms")
V = _attribute("agentspec.v", "str", OURS, "v(n) in force at the widths used: 'v(1)=1.00 v(5)=1.87'")
BREAK_EVEN = _attribute("agentspec.break_even", "float", OURS, "tokens per step from which drafting paid")
BELOW = _attribute("agentspec.below_break_even", "bool", OURS, "tokens_per_step < break_even")
SAVED_MS = _attribute("agentspec.time_saved_ms", "float", OURS, "estimated against plain decoding, ms; may be < 0")
SAVED_HOW = _attribute("agentspec.time_saved.how", "str", OURS, "how that was estimated")
SEED_USED = _attribute("agentspec.seed", "int", OURS, "what was drawn with, given or made up")
NEAR_TIES = _attribute("agentspec.near_ties", "int", OURS, "positions decided again at n = 1")
FINGERPRINT = _attribute(
    "agentspec.template.fingerprint",
    "str",
    OURS,
    "hash of the prompt before the first message that isn't the system's",
)

# ---- ours, on agent spans ------------------------------------------------------------

CALLS = _attribute("agentspec.calls", "int", OURS, "calls of the trajectory")
# Not gen_ai.usage.*: backends add those up over a trace, and would count each call's tokens twice.
TOTAL_INPUT = _attribute("agentspec.input_tokens", "int", OURS, "prompt tokens of the trajectory's calls")
TOTAL_OUTPUT = _attribute("agentspec.output_tokens", "int", OURS, "output tokens of the trajectory's calls")
DRIFT = _attribute("agentspec.drift", "str", OURS, "why drafting does not pay here, in words")
DRIFT_CAUSE = _attribute("agentspec.drift.cause", "str", OURS, "the same, as one of drift.Cause")

# ---- ours, on verify-step events ------------------------------------------------------------

STEP_EVENT = "agentspec.verify_step"
STEP_NUMBER = _attribute("agentspec.step.number", "int", OURS, "which of the call's steps, from 0")
STEP_MS = _attribute("agentspec.step.ms", "float", OURS, "since the step before, ms; for step 0 since the request")
STEP_TOKENS = _attribute("agentspec.step.tokens", "int", OURS, "tokens it emitted")
STEP_PROPOSED = _attribute("agentspec.step.proposed", "int", OURS, "draft tokens it verified")
STEP_ACCEPTED = _attribute("agentspec.step.accepted", "int", OURS, "draft tokens it accepted")
STEP_WHY = _attribute("agentspec.step.chosen_for", "str", OURS, "slow or rejected")

# ---- metrics ------------------------------------------------------------

OPERATION_DURATION = _metric(
    "gen_ai.client.operation.duration",
    "histogram",
    "s",
    GENAI_METRICS,
    "GenAI operation duration.",
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
TIME_TO_FIRST_TOKEN = _metric(
    "gen_ai.server.time_to_first_token",
    "histogram",
    "s",
    GENAI_METRICS,
    "Time to generate first token for successful responses.",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TIME_PER_OUTPUT_TOKEN = _metric(
    "gen_ai.server.time_per_output_token",
    "histogram",
    "s",
    GENAI_METRICS,
    "Time per output token generated after the first token for successful responses.",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
TOKEN_USAGE = _metric(
    "gen_ai.client.token.usage",
    "histogram",
    "{token}",
    GENAI_METRICS,
    "Number of input and output tokens used.",
    (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864),
)
_RATIO = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
ACCEPTANCE_RATE = _metric("agentspec.acceptance_rate", "histogram", "1", OURS, "accepted / proposed, a call", _RATIO)
CONDITIONAL_ACCEPTANCE = _metric(
    "agentspec.conditional_acceptance",
    "histogram",
    "1",
    OURS,
    "accepted / (accepted + mismatches), a call",
    _RATIO,
)
STEP_TOKENS_METRIC = _metric(
    "agentspec.tokens_per_step",
    "histogram",
    "{token}",
    OURS,
    "Output tokens / verify steps, a call.",
    (1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0),
)
MEMORY_BYTES = _metric("agentspec.memory.bytes", "gauge", "By", OURS, "Bytes held by the trajectory memories.")
DRIFTED_CALLS = _metric("agentspec.drift.calls", "counter", "{call}", OURS, "Calls in which drift was said, by cause.")
