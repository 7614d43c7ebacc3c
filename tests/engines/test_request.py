"""GenerationRequest: every bad value is a typed error that names the option."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agentspec.engines.request import GenerationRequest, check_fits
from agentspec.errors import InvalidRequestError, UnknownOptionError

pytestmark = pytest.mark.fast


class Odd:
    """Calls itself a number, and fails whoever takes it for one."""

    def __index__(self) -> int:
        raise LookupError("no number")

    def __eq__(self, other: object) -> bool:
        raise LookupError("nor like any")

    __hash__ = object.__hash__


def test_defaults_work() -> None:
    request = GenerationRequest(input_ids=[1, 2])
    assert request.temperature == 0
    assert request.stop_texts == () and request.stop_sequences == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", "5"),
        ("min_tokens", -1), ("min_tokens", None),
        ("n", 0), ("n", 129), ("n", None),
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "hot"),
        ("temperature", None),
        ("top_p", 0.0), ("top_p", 1.01), ("top_p", float("nan")),
        ("top_k", -1), ("top_k", 2.5),
        ("min_p", -0.01), ("min_p", 1.5),
        ("seed", -1), ("seed", 2**64), ("seed", 1.0),
        ("repetition_penalty", 0.0), ("repetition_penalty", -1.0),
        ("presence_penalty", float("nan")), ("frequency_penalty", "much"),
        ("logit_bias", [1, 2]), ("logit_bias", {"a": 1.0}), ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: float("inf")}), ("logit_bias", {-1: 1.0}), ("logit_bias", {1: "x"}),
        ("logit_bias", {1: None}), ("logit_bias", {1: np.array([1, 2])}), ("logit_bias", {1: Odd()}),
        ("logit_bias", {Odd(): 1.0}), ("max_tokens", np.array([1, 2])), ("n", Odd()),
        ("bad_words", "word"), ("bad_words", [""]), ("bad_words", [[]]), ("bad_words", [[-1]]), ("bad_words", [3]),
        ("stop", ""), ("stop", [""]), ("stop", 3), ("stop", [3]),
        ("stop_token_ids", 3), ("stop_token_ids", [-1]), ("stop_token_ids", [[]]), ("stop_token_ids", ["x"]),
        ("logprobs", 3), ("top_logprobs", -1), ("draft", "no"), ("ignore_eos", 1), ("constraint", 5),
    ],
)  # fmt: skip
def test_bad_values_name_the_option(name: str, value: Any) -> None:
    if name == "stop" and value == "":
        assert GenerationRequest(input_ids=[1], stop="x").stop_texts == ("x",)
    with pytest.raises(InvalidRequestError, match=name):
        GenerationRequest(input_ids=[1], **{name: value})


@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("seed", lambda number: number), ("n", lambda number: number), ("temperature", lambda number: number),
        ("max_tokens", lambda number: -number), ("top_k", lambda number: -number), ("draft", lambda number: number),
        ("logit_bias", lambda number: {5: number}), ("logit_bias", lambda number: {number: "x"}),
        ("stop_token_ids", lambda number: [[-number]]), ("stop", lambda number: [number]),
        ("bad_words", lambda number: number), ("spans", lambda number: number), ("trajectory", lambda number: number),
    ],
)  # fmt: skip
def test_a_long_number_is_not_echoed(name: str, wrap: Callable[[int], Any], digits: int) -> None:
    with pytest.raises(InvalidRequestError, match=name) as refused:
        GenerationRequest(input_ids=[1], **{name: wrap(10**digits)})
    assert len(str(refused.value)) < 300


def test_a_bias_out_of_range_says_what_is_needed() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"^logit_bias of 5: needed -inf or a number from -1e\+30 to 1e\+30, got"
    ):
        GenerationRequest(input_ids=[1], logit_bias={5: 1e39})
    never = {5: -math.inf, 6: 1e30, 7: np.float32(-math.inf)}
    assert GenerationRequest(input_ids=[1], logit_bias=never).logit_bias == never


def test_min_above_max() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        GenerationRequest(input_ids=[1], max_tokens=3, min_tokens=4)


def test_unknown_option_is_an_error_with_a_hint() -> None:
    with pytest.raises(UnknownOptionError, match="did you mean temperature"):
        GenerationRequest.of(input_ids=[1], temprature=0.5)
    with pytest.raises(UnknownOptionError, match="known are"):
        GenerationRequest.of(input_ids=[1], zzz=0.5)
    with pytest.raises(UnknownOptionError, match="unknown option 'xxx") as refused:
        GenerationRequest.of(input_ids=[1], **{"x" * 100_000: 2})
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(("ids", "told"), [([-1], "got -1"), ([3, -1, 12], "got -1..12")])
def test_ids_that_a_model_lacks_are_told(ids: list[int], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"input_ids: this model's ids are 0\.\.9") as refused:
        check_fits(GenerationRequest(input_ids=ids), 10, 100, "so it is")
    assert str(refused.value).endswith(told)


def test_stop_forms() -> None:
    request = GenerationRequest(input_ids=[1], stop="end", stop_token_ids=[3, [4, 5], np.int64(6)])
    assert request.stop_texts == ("end",)
    assert request.stop_sequences == ((3,), (4, 5), (6,))
    assert GenerationRequest(input_ids=[1], stop=["a", "b"]).stop_texts == ("a", "b")
