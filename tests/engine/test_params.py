"""Parameters are checked when they are made: what is out of range is named, with the range."""

from __future__ import annotations

from typing import Any

import pytest

from futransformer import SamplingParams
from futransformer.generator.errors import InputError


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert repr(params) == "SamplingParams()"
    assert (params.n, params.max_tokens, params.min_tokens, params.temperature, params.top_p) == (1, 16, 0, 1, 1)
    assert (params.top_k, params.min_p, params.repetition_penalty, params.seed, params.logprobs) == (
        -1,
        0,
        1,
        None,
        None,
    )
    assert (params.stop, params.stop_token_ids, params.ignore_eos, params.skip_special_tokens) == ((), (), False, True)
    assert not params.greedy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n is at least 1, not 0"),
        ({"n": 1.5}, "n is a whole number, at least 1, not 1.5"),
        ({"n": True}, "n is at least 1, not True"),
        ({"max_tokens": 0}, "max_tokens is at least 1"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens is 0 .. 3, not 4"),
        ({"temperature": -0.1}, "temperature is at least 0, not -0.1"),
        ({"temperature": float("nan")}, "temperature is at least 0, not nan"),
        ({"temperature": "1"}, "temperature is a number"),
        ({"top_p": 0}, "top_p is above 0, at most 1, not 0"),
        ({"top_p": 1.01}, "top_p is above 0, at most 1"),
        ({"top_k": -2}, "top_k is at least -1"),
        ({"min_p": 2}, "min_p is at least 0, at most 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is above 0"),
        ({"seed": 2**63}, r"seed is -9223372036854775808 .. 9223372036854775807"),
        ({"logprobs": 21}, "logprobs is 0 .. 20"),
        ({"stop": ["a", ""]}, "empty string would end every text"),
        ({"stop": [3]}, "stop is a list of strings"),
        ({"stop_token_ids": 3}, "stop_token_ids is a list of token ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids are not negative"),
    ],
)
def test_what_is_out_of_range_is_refused(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SamplingParams(**options)


def test_lists_become_tuples_in_a_fixed_order() -> None:
    params = SamplingParams(stop="end", stop_token_ids={9, 4}, seed=-(2**63), max_tokens=None, min_tokens=5)  # type: ignore[arg-type]
    assert params.stop == ("end",)
    assert params.stop_token_ids == (4, 9)
    assert repr(params) == (
        "SamplingParams(max_tokens=None, min_tokens=5, stop=('end',), stop_token_ids=(4, 9), seed=-9223372036854775808)"
    )
    assert SamplingParams(temperature=1e-6).greedy
