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
