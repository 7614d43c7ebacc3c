"""The formulas against the figures of the project's source documents, and the verify-cost curve."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.drafting import CostCurve
from agentspec.drafting.economics import (
    best_k,
    break_even_acceptance,
    chain_speedup,
    expected_tokens,
    speedup_curve,
    speedup_per_step,
    speedup_per_token,
)
from agentspec.errors import InvalidRequestError

pytestmark = pytest.mark.fast

KS = (1, 2, 3, 4, 6, 8)
# Speedup at c = 0.10 per token, a by k.
SPEEDUP = {
    0.2: (1.09, 1.03, 0.96, 0.89, 0.78, 0.69),
    0.4: (1.27, 1.30, 1.25, 1.18, 1.04, 0.93),
    0.6: (1.45, 1.63, 1.67, 1.65, 1.52, 1.37),
    0.8: (1.64, 2.03, 2.27, 2.40, 2.47, 2.40),
    0.9: (1.73, 2.26, 2.65, 2.93, 3.26, 3.40),
}


@pytest.mark.parametrize("a", SPEEDUP)
def test_speedup_table(a):
    assert [round(speedup_per_token(a, k, 0.10), 2) for k in KS] == pytest.approx(SPEEDUP[a], abs=0.0051)


@pytest.mark.parametrize(
    ("c", "k", "digits", "a"),
    [
        (0.10, 2, 3, 0.171), (0.10, 4, 3, 0.287), (0.10, 8, 3, 0.445),
        (0.20, 2, 2, 0.31), (0.20, 4, 2, 0.46), (0.20, 8, 2, 0.62),
        (0.30, 2, 2, 0.42), (0.30, 4, 2, 0.57), (0.30, 8, 2, 0.72),
    ],
)  # fmt: skip
def test_break_even(c, k, digits, a):
    assert round(break_even_acceptance(k, c), digits) == a


def test_break_even_ends():
    assert break_even_acceptance(4, 0.0) == 0.0
    assert break_even_acceptance(2, 1.5) == math.inf  # even a = 1 gives 3 tokens for 4 forwards
    assert break_even_acceptance(1, 0.25, per="step") == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("a", "k", "s"), [(0.2, 1, 1.09), (0.4, 2, 1.30), (0.6, 3, 1.67), (0.8, 6, 2.47), (0.9, 8, 3.40)]
)
def test_best_k(a, k, s):
    assert (best_k(a, 0.10)[0], round(best_k(a, 0.10)[1], 2)) == (k, s)


@pytest.mark.parametrize(("a", "s"), [(0.9, 3.56), (0.7, 2.41), (0.5, 1.68), (0.3, 1.24)])
def test_speedup_per_step(a, s):
    assert round(speedup_per_step(a, 4, 0.15), 2) == s


def test_chain_speedup():
    assert chain_speedup(2.0, 1.0) == 2.0
    assert chain_speedup(2.0, 0.0) == 1.0
    assert chain_speedup(3.0, 0.5) == pytest.approx(1.5)


def test_unconditional_acceptance_is_another_number():
    # at a = 0.8, k = 8 accepted / proposed is 0.42: sum of a^i over k
    assert round((expected_tokens(0.8, 8) - 1) / 8, 2) == 0.42


@given(st.floats(0, 1), st.integers(0, 40))
def test_expected_tokens_bounds(a, k):
    e = expected_tokens(a, k)
    assert 1.0 <= e <= k + 1 + 1e-9
    if a < 1:
        assert e == pytest.approx((1 - a ** (k + 1)) / (1 - a), rel=1e-9)


@given(st.integers(1, 30), st.floats(0.01, 0.9))
def test_break_even_is_where_the_speedup_is_one(k, c):
    a = break_even_acceptance(k, c)
    if math.isfinite(a):
        assert speedup_per_token(a, k, c) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(
    "call",
    [
        lambda: expected_tokens(1.2, 2),
        lambda: expected_tokens(0.5, -1),
        lambda: expected_tokens(0.5, 1.5),
        lambda: speedup_per_token(0.5, 2, -0.1),
        lambda: chain_speedup(0.0, 0.5),
        lambda: chain_speedup(2.0, 1.5),
        lambda: best_k(0.5, 0.1, ()),
        lambda: break_even_acceptance(2, 0.1, per="call"),
        lambda: CostCurve({2: 1.0}),
        lambda: CostCurve({1: 1.5}),
        lambda: CostCurve({1: 1.0, 2: math.nan}),
        lambda: CostCurve({1: 1.0})(0),
        lambda: CostCurve.measured({2: 1.0}),
    ],
)
def test_bad_input_is_a_typed_error(call):
    with pytest.raises(InvalidRequestError, match="needed"):
        call()


class TestCostCurve:
    curve = CostCurve({1: 1.0, 2: 2.2, 16: 2.7, 32: 3.1}, base_ms=100.0)

    def test_points_and_between(self):
        assert self.curve(1) == 1.0
        assert self.curve(2) == 2.2
        assert self.curve(9) == pytest.approx(2.45)
        assert self.curve(48) == pytest.approx(3.5)  # the last slope goes on

    def test_table_agrees_with_the_curve(self):
        table = self.curve.table(40)
        assert len(table) == 42
        assert np.allclose(table[1:], [self.curve(n) for n in range(1, 42)])
        assert len(self.curve.table(1000)) == 1002

    def test_speedup_uses_v_of_k_plus_one(self):
        assert speedup_curve(0.5, 1, 0.0, self.curve) == pytest.approx(1.5 / 2.2)

    def test_a_jump_of_v_means_long_or_nothing(self):
        # DESIGN: on a CPU v(2) may be 2.2 and v(16) 2.7
        assert self.curve.best_width([0.9**i for i in range(1, 17)]) >= 12
        assert self.curve.best_width([0.5, 0.25, 0.12]) == 0

    def test_load_narrows_smoothly(self):
        paths = [0.8**i for i in range(1, 17)]
        gpu = CostCurve({1: 1.0, 64: 1.3, 128: 2.2, 256: 4.4})
        widths = [gpu.at_batch(b).best_width(paths) for b in (1, 8, 16, 32, 64, 128)]
        assert widths == sorted(widths, reverse=True)
        assert widths[0] == 16 and widths[-1] <= 2
        assert all(a - b <= 10 for a, b in pairwise(widths))

    def test_measured_is_monotone(self):
        curve = CostCurve.measured({1: 100.0, 2: 130.0, 4: 120.0})
        assert curve.points == {1: 1.0, 2: 1.3, 4: 1.3}
        assert curve.base_ms == 100.0
