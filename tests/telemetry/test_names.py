"""The table of names against the conventions that are installed."""

from __future__ import annotations

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from opentelemetry.semconv.attributes import error_attributes, server_attributes

from agentspec.telemetry import names

pytestmark = pytest.mark.fast

CONVENTIONAL = {
    value
    for module in (gen_ai_attributes, gen_ai_metrics, error_attributes, server_attributes)
    for name, value in vars(module).items()
    if name.isupper() and isinstance(value, str)
}
# Named by the repository that the conventions moved to, not yet by the Python package.
LATER: set[str] = set()


@pytest.mark.parametrize("key", [*names.ATTRIBUTES, *names.METRICS])
def test_a_name_is_conventional_or_ours(key):
    if key.startswith("agentspec."):
        return
    assert key in CONVENTIONAL | LATER, f"{key} is neither conventional nor ours"


def test_nothing_deprecated_is_written():
    old = {"gen_ai.system", "gen_ai.prompt", "gen_ai.completion", "gen_ai.usage.prompt_tokens"}
    assert not old & set(names.ATTRIBUTES)


def test_every_entry_says_where_it_comes_from():
    for entry in [*names.ATTRIBUTES.values(), *names.METRICS.values()]:
        assert entry.source and entry.meaning


def test_families_are_found_by_their_members():
    assert names.known("agentspec.itl.token.p95_ms") is names.ATTRIBUTES["agentspec.itl.token.*"]
    assert names.known("agentspec.not_drafted.last_token") is names.ATTRIBUTES["agentspec.not_drafted.*"]
    assert names.known("agentspec.nonsense") is None


def test_units_and_descriptions_are_the_conventions():
    made = []

    class Meter:
        def create_histogram(self, name, unit, description):
            made.append((name, unit, description))

    for create in (
        "client_operation_duration",
        "client_token_usage",
        "server_time_to_first_token",
        "server_time_per_output_token",
    ):
        getattr(gen_ai_metrics, f"create_gen_ai_{create}")(Meter())
    for name, unit, description in made:
        assert (names.METRICS[name].unit, names.METRICS[name].meaning) == (unit, description)


# As gen-ai-metrics.md gives them ("SHOULD be specified with ExplicitBucketBoundaries of"); no package has them.
BUCKETS = {
    "gen_ai.client.operation.duration": [
        *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28),
        *(2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    ],
    "gen_ai.server.time_to_first_token": [
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
        *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    ],
    "gen_ai.server.time_per_output_token": [
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3),
        *(0.4, 0.5, 0.75, 1.0, 2.5),
    ],
    "gen_ai.client.token.usage": [4**k for k in range(14)],
}


@pytest.mark.parametrize("name", BUCKETS)
def test_the_conventional_buckets(name):
    assert list(names.METRICS[name].buckets) == BUCKETS[name]
