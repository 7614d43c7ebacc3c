"""What a request may say to the plugin, and that nothing it says can raise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_agentspec.requests import read_settings

from agentspec.memory import Source, Span

pytestmark = pytest.mark.fast


def request(custom: Any = None, **fields: Any) -> SimpleNamespace:
    known = {"session_id": None, "session": None, "cache_salt": None, "extra_key": None, **fields}
    return SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom), **known)


def test_session_id_goes_before_custom_params() -> None:
    settings = read_settings(request({"agentspec_trajectory": "b"}, session_id="a"), 5, 100)
    assert (settings.trajectory, settings.joined_by) == ("session:a", "session_id")
    settings = read_settings(request({"agentspec_trajectory": "b"}), 5, 100)
    assert (settings.trajectory, settings.joined_by) == ("custom:b", "custom_params")
    assert read_settings(request(), 5, 100).trajectory is None


def test_tenants_are_scopes_and_cannot_be_forged_into_each_other() -> None:
    scopes = {
        read_settings(request(cache_salt=a, extra_key=b), 5, 100).scope
        for a, b in [(None, None), ("a", None), (None, "a"), ("a", "b"), ("a', 'b", None), ("ab", None)]
    }
    assert len(scopes) == 6


def test_seeds_and_spans() -> None:
    settings = read_settings(
        request({"agentspec_seed_ids": [1, 2, -1, 3, -1, -1], "agentspec_spans": [0, 2, 0, 2, 5, 1]}), 5, 100
    )
    assert [s.tolist() for s in settings.seeds] == [[1, 2], [3]]
    assert settings.spans == (Span(0, 2, Source.PROMPT), Span(2, 5, Source.TOOL))
    assert settings.problems == ()


@pytest.mark.parametrize(
    ("custom", "named"),
    [
        ({"agentspec_seed_ids": [100]}, "agentspec_seed_ids"),
        ({"agentspec_seed_ids": [-2]}, "agentspec_seed_ids"),
        ({"agentspec_seed_ids": [1.5]}, "agentspec_seed_ids"),
        ({"agentspec_seed_ids": "text"}, "agentspec_seed_ids"),
        ({"agentspec_seed_texts": "text"}, "agentspec_seed_texts"),
        ({"agentspec_seed_texts": [1]}, "agentspec_seed_texts"),
        ({"agentspec_spans": [0, 1]}, "agentspec_spans"),
        ({"agentspec_spans": [0, 9, 0]}, "agentspec_spans"),
        ({"agentspec_spans": [3, 2, 0]}, "agentspec_spans"),
        ({"agentspec_spans": [0, 1, 99]}, "agentspec_spans"),
        ({"agentspec_other": 1}, "agentspec_other"),
    ],
)
def test_what_cannot_be_used_is_said(custom: dict[str, Any], named: str) -> None:
    settings = read_settings(request(custom), 5, 100)
    [problem] = settings.problems
    assert named in problem
    assert settings.seeds == () and settings.seed_texts == () and settings.spans is None


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["trajectory", "namespace", "draft", "seed_ids", "seed_texts", "spans"]).map(
            "agentspec_".__add__
        ),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.text("aé 1", max_size=5),
            st.floats(),
            st.lists(
                st.one_of(st.integers(-3, 3), st.text("aé 1", max_size=3), st.none(), st.integers()),
                max_size=7,
            ),
        ),
    )
)
def test_nothing_a_request_says_raises(custom: dict[str, Any]) -> None:
    settings = read_settings(request(custom), 5, 100)
    assert all(isinstance(piece, np.ndarray) and piece.min() >= 0 and piece.max() < 100 for piece in settings.seeds)
