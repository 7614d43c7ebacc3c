"""A call's figures as attributes, against the definitions in DESIGN's words and CallStats' own figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.engines.base import CallStats
from agentspec.telemetry import figures
from agentspec.telemetry import names as n

pytestmark = pytest.mark.fast

arrivals = st.lists(st.tuples(st.floats(0.01, 1e4), st.integers(1, 16)), min_size=1, max_size=40).map(
    lambda gaps: [(sum(g for g, _ in gaps[: i + 1]), tokens) for i, (_, tokens) in enumerate(gaps)]
)


def call(arrivals, **fields):
    tokens = sum(m for _, m in arrivals)
    return CallStats(arrivals=arrivals, output_tokens=tokens, verify_steps=len(arrivals), **fields)


@given(arrivals)
def test_gaps_are_summarised_as_callstats_defines_them(arrivals):
    stats = call(arrivals)
    written, own = figures.call_attributes(stats), stats.to_dict()
    for ours, theirs in ((n.ITL_TOKEN, "itl_per_token_ms"), (n.ITL_ARRIVAL, "itl_per_arrival_ms")):
        if own[theirs] is None:
            assert not [key for key in written if key.startswith(ours)]
        else:
            for name, value in own[theirs].items():
                assert written[f"{ours}.{name}_ms"] == pytest.approx(value)
    if stats.itl_mean_ms is not None:
        assert written[n.ITL_MEAN] == pytest.approx(stats.itl_mean_ms)


def test_saved_time_by_hand():
    # Prefill at 100 ms, then four steps of 30 ms each that emit 3 tokens at a mean v of 1.5: a plain step
    # takes 20 ms,
    # 12 tokens of them 240 ms instead of 120.
    stats = call([(100.0, 1), (130.0, 3), (160.0, 3), (190.0, 3), (220.0, 3)], mean_cost=1.5)
    assert figures.time_saved_ms(stats) == pytest.approx(12 * 20 - 120)
    assert "plain steps" in figures.call_attributes(stats)[n.SAVED_HOW]


def test_time_is_lost_where_drafts_cost_and_bring_nothing():
    stats = call([(10.0, 1), (40.0, 1), (70.0, 1)], mean_cost=1.5, proposed=8)
    assert figures.time_saved_ms(stats) == pytest.approx(2 * 20 - 60)
    assert figures.call_attributes(stats)[n.BELOW] is True


def test_plain_decoding_saves_nothing_and_is_not_below_break_even():
    stats = call([(10.0, 1), (20.0, 1), (30.0, 1)], not_drafted={"off": 3})
    assert figures.time_saved_ms(stats) == pytest.approx(0.0)
    stats.mean_cost = 1.02  # what a proposer would have cost
    assert figures.time_saved_ms(stats) == 0.0
    written = figures.call_attributes(stats)
    assert written[n.BELOW] is False and written[n.NO_DRAFT] is True
    assert written["agentspec.not_drafted.off"] == 3
    assert n.ACCEPTANCE not in written and written[n.ACCEPTANCE_BAND] == "none"


@pytest.mark.parametrize(
    ("rate", "band"), [(0.0, "0-20%"), (0.19, "0-20%"), (0.2, "20-40%"), (0.999, "80-100%"), (1.0, "80-100%")]
)
def test_bands(rate, band):
    assert figures.band(rate) == band


def test_a_trajectory_is_the_sum_of_its_calls():
    first = call([(10.0, 1), (40.0, 5)], proposed=8, accepted=4, mismatches=1, mean_cost=1.5, prompt_tokens=100)
    second = call([(5.0, 1), (15.0, 1)], mean_cost=1.0, prompt_tokens=120)
    written = figures.totals([first, second])
    assert written[n.CALLS] == 2 and written[n.STEPS] == 4 and written[n.TOTAL_OUTPUT] == 8
    assert written[n.TOTAL_INPUT] == 220
    assert written[n.TOKENS_PER_STEP] == 2.0 and written[n.BREAK_EVEN] == pytest.approx(1.25)
    assert written[n.ACCEPTANCE] == 0.5 and written[n.CONDITIONAL] == pytest.approx(0.8)
    saved = figures.time_saved_ms(first) + figures.time_saved_ms(second)
    assert written[n.SAVED_MS] == pytest.approx(saved)


def test_a_trajectorys_tokens_are_not_counted_twice_by_a_backend():
    assert not [key for key in figures.totals([call([(1.0, 1), (2.0, 1)])]) if key.startswith("gen_ai.usage")]


def test_a_trajectory_without_calls_says_so():
    assert figures.totals([])[n.CALLS] == 0
