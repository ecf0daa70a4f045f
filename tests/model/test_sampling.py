"""Choosing tokens: which stay in, how likely each is, and that a row's choice is its own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from futransformer.generator.errors import InputError
from futransformer.sampling import (
    GREEDY,
    LOG2_E,
    OUT_OF_REACH,
    PHILOX_MULTIPLIERS,
    PHILOX_WEYL,
    STEPS,
    Sampling,
    SamplingRows,
    choose,
    exp2_of,
    gumbel,
    log2_of,
    mark_seen,
    masses,
    pack_seen,
    philox,
    sample,
    unpack_seen,
)

NAN, INF = math.nan, math.inf
HALVES = LOG2_E  # a temperature at which logits count halvings: 2^logit is the weight of a token, exactly
DRAWS = 20_000


def rows_of(settings: list[Sampling], position: int = 0, seen: Tensor | None = None) -> SamplingRows:
    return SamplingRows.of(settings, torch.arange(position, position + len(settings), dtype=torch.int32), seen)


def draws(logits: list[float], sampling: Sampling, count: int = DRAWS, seen: Tensor | None = None) -> Tensor:
    """How often each token is chosen at ``count`` positions, of all: float64 [vocab_size]."""
    many = None if seen is None else seen.expand(count, -1)
    tokens = choose(torch.tensor([logits]).expand(count, -1), rows_of([sampling] * count, seen=many))
    return tokens.bincount(minlength=len(logits)).double() / count


def kept(logits: list[float], sampling: Sampling) -> list[int]:
    """Tokens that can be chosen, as many draws show: one of 1/16 is missed at (15/16)^20000."""
    return draws(logits, sampling).nonzero()[:, 0].tolist()


def philox_of(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 of one counter, as its paper writes it."""
    for _ in range(10):
        high, low = zip(
            *(divmod(m * c, 2**32) for m, c in zip(PHILOX_MULTIPLIERS, counter[::2], strict=True)), strict=True
        )
        counter = [high[1] ^ counter[1] ^ key[0], low[1], high[0] ^ counter[3] ^ key[1], low[0]]
        key = [(k + w) % 2**32 for k, w in zip(key, PHILOX_WEYL, strict=True)]
    return counter


def test_philox_counts_as_published() -> None:
    """The known answers of Random123 for zeros and ones, and a row of ours by the same function."""
    assert philox_of([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox_of([2**32 - 1] * 4, [2**32 - 1] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    seeds, position = [0, -1, 2**40 + 7, -(2**63)], 31
    bits = philox(torch.tensor(seeds), torch.full((4,), position, dtype=torch.int32), 11)
    for row, seed in enumerate(seeds):
        key = [seed % 2**32, (seed >> 32) % 2**32]
        expected = [word for quad in range(3) for word in philox_of([quad, position, 0, 0], key)]
        assert bits[row].tolist() == expected[:11]


def test_noise_is_gumbels() -> None:
    """Mean and variance over a million, within five standard errors of those of (Gumbel + log log 2) / log 2."""
    noise = gumbel(torch.arange(100), torch.arange(100, dtype=torch.int32), 10_000).double()
    count, euler = noise.numel(), 0.5772156649
    mean, variance = (euler + math.log(math.log(2))) / math.log(2), (math.pi / math.log(2)) ** 2 / 6
    assert noise.isfinite().all()
    # what the kernel bounds it by, from the leading zeros of 2^32 - n
    rest = 2**32 - (philox(torch.arange(100), torch.arange(100, dtype=torch.int32), 10_000) | 1)
    zeros = 31 - rest.double().log2().floor()
    assert (noise + 0.5 < zeros + 1).all()
    assert abs(noise.mean().item() - mean) < 5 * math.sqrt(variance / count)
    # the fourth central moment of a Gumbel variable is 5.4 squared variances
    assert abs(noise.var().item() - variance) < 5 * variance * math.sqrt((5.4 - 1) / count)


def test_powers_and_logarithms() -> None:
    fraction = torch.linspace(0, 1, 100_001)
    assert ((exp2_of(fraction).double() / fraction.double().exp2() - 1).abs() < 2.0**-22).all()
    values = torch.logspace(-37, 37, 100_001)
    exact = values.double().log2()
    assert ((log2_of(values).double() - exact).abs() <= 2.0**-21 + exact.abs() * 2.0**-23).all()
    near_one = torch.tensor([1 - 2.0**-24, 1.0, 1 + 2.0**-23])
    assert torch.allclose(log2_of(near_one).double(), near_one.double().log2(), rtol=2.0**-20, atol=0)
    steps = torch.tensor([0, 1, 30, 31, 63]) * STEPS
    assert masses(steps).tolist() == [2**30, 2**29, 1, 0, 0]
    every = torch.arange(0, 3 * STEPS, 7)
    assert (masses(every).diff() <= 0).all(), "more of what is less likely"
    exact = 2.0**30 * (-every.double() / STEPS).exp2()
    assert ((masses(every) - exact).abs() <= 1 + 2.0**-22 * exact).all()


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        (Sampling(HALVES), [0, 1, 2, 3, 4, 5]),
        (Sampling(HALVES, top_k=1), [1]),
        (Sampling(HALVES, top_k=2), [0, 1, 3, 5]),  # the second to the fourth are equal
        (Sampling(HALVES, top_k=4), [0, 1, 3, 5]),
        (Sampling(HALVES, top_k=99), [0, 1, 2, 3, 4, 5]),
        (Sampling(HALVES, top_k=-1), [0, 1, 2, 3, 4, 5]),
        (Sampling(HALVES, top_p=0.5), [1]),
        (Sampling(HALVES, top_p=0.5000001), [0, 1, 3, 5]),
        (Sampling(HALVES, top_p=0.875), [0, 1, 3, 5]),
        (Sampling(HALVES, top_p=0.8750001), [0, 1, 2, 3, 4, 5]),
        (Sampling(HALVES, top_k=4, top_p=0.8750001), [0, 1, 3, 5]),
        (Sampling(HALVES, top_k=4, top_p=0.57), [1]),  # of what top-k leaves 8/14, 0.571, are enough
        (Sampling(HALVES, top_k=4, top_p=0.58), [0, 1, 3, 5]),
        (Sampling(HALVES, top_p=0.01), [1]),
        (Sampling(HALVES, min_p=0.125), [0, 1, 2, 3, 4, 5]),
        (Sampling(HALVES, min_p=0.1250001), [0, 1, 3, 5]),
        (Sampling(HALVES, min_p=0.25), [0, 1, 3, 5]),
        (Sampling(HALVES, min_p=0.2500001), [1]),
        (Sampling(HALVES, min_p=1.0), [1]),
    ],
)
def test_what_stays_in(sampling: Sampling, tokens: list[int]) -> None:
    """Weights of sixteenths, all powers of two, so that every bound is met exactly or missed."""
    weights = [2, 8, 1, 2, 1, 2]
    assert kept([math.log2(weight) for weight in weights], sampling) == tokens


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_distribution(temperature: float) -> None:
    """Chi-squared over 8 tokens: 7 degrees of freedom, five standard deviations above its mean."""
    logits = [0.3, -1.0, 2.0, 1.9, -0.2, 0.0, -3.0, 1.0]
    expected = (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(0)
    found = draws(logits, Sampling(temperature, seed=3))
    assert DRAWS * ((found - expected).square() / expected).sum() < 7 + 5 * math.sqrt(2 * 7)


def test_what_is_left_keeps_its_proportions() -> None:
    expected = torch.tensor([0.0, 2, 0, 1, 1]).double() / 4
    found = draws([0.0, 2.0, 0.0, 1.0, 1.0], Sampling(HALVES, top_k=3))
    assert DRAWS * ((found - expected).square() / expected.clamp(min=1e-9)).sum() < 2 + 5 * math.sqrt(2 * 2)


def test_a_row_chooses_by_itself() -> None:
    """The same whatever stands beside it, wherever it stands, and whichever token came before."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 999, generator=generator)
    settings = [Sampling(1.5, top_k=row, top_p=0.5 + row / 32, seed=row) for row in range(16)]
    together = rows_of(settings)
    chosen = choose(logits, together)
    order = torch.randperm(16, generator=generator)
    assert torch.equal(choose(logits[order], together.keep(order)), chosen[order])
    for row in range(16):
        assert choose(logits[row : row + 1], together.keep(torch.tensor([row]))).item() == chosen[row]
    assert len({choose(logits[:1], rows_of([settings[0]], position)).item() for position in range(50)}) > 10
    others = [Sampling(1.5, seed=seed) for seed in range(50)]
    same_place = SamplingRows.of(others, torch.zeros(50, dtype=torch.int32))
    assert len(set(choose(logits[:1].expand(50, -1), same_place).tolist())) > 10


def test_greedy_rows_stand_among_others() -> None:
    logits = torch.tensor([[1.0, 5, 5, 2], [1.0, 5, 5, 2], [NAN, 1, 1, NAN], [NAN, INF, -INF, INF]])
    seeds = [Sampling(1.0, seed=seed) for seed in range(40)]
    chosen = {choose(logits[:2], rows_of([GREEDY, each]))[0].item() for each in seeds}
    assert chosen == {1}, "the lowest among equals"
    assert choose(logits[2:], rows_of([GREEDY, GREEDY])).tolist() == [1, 1]


def test_no_draw_is_not_a_number() -> None:
    """NaN and -inf are never drawn while there is a number; infinities are drawn alone; else as argmax does."""
    logits = torch.tensor(
        [[NAN, 0, -INF, 0], [NAN, INF, 1, INF], [-INF] * 4, [NAN] * 4, [NAN, NAN, -INF, NAN], [3e38, -3e38, 3e38, NAN]]
    )
    found: list[set[int]] = [set() for _ in logits]
    for position in range(0, 600, 6):
        for row, token in enumerate(choose(logits, rows_of([Sampling(1.5)] * 6, position)).tolist()):
            found[row].add(token)
    assert found == [{1, 3}, {1, 3}, {0}, {0}, {2}, {0, 2}]


def test_nothing_out_of_reach_can_win() -> None:
    """The most that noise adds to a token, less the least that it adds to the likeliest, is what reach allows for."""
    most, least = -math.log2(-math.log2(1 - 2.0**-32)), -math.log2(32)  # of n = 2^32 - 1, and of n = 1
    assert most - least < OUT_OF_REACH / STEPS
    noise = gumbel(torch.arange(64), torch.zeros(64, dtype=torch.int32), 4096)
    assert least - 1e-3 <= noise.min()
    assert noise.max() <= most + 1e-3


@pytest.mark.parametrize("temperature", [1e-44, 1e-30])
def test_a_temperature_next_to_nothing_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[1.0, 1.0000001, -50, 0]]).expand(64, -1)
    assert set(choose(logits, rows_of([Sampling(temperature)] * 64)).tolist()) == {1}


def test_repetition_penalty() -> None:
    """Only what was seen, towards less likely on either side of zero, before the temperature."""
    logits = torch.tensor([[4.0, 2.5, -1.0, -1.5]]).expand(2, -1)
    seen = pack_seen([[0, 2], []], 4)
    greedy = Sampling(0.0, repetition_penalty=2.0)
    assert choose(logits, rows_of([greedy, greedy], seen=seen)).tolist() == [1, 0]
    halved = Sampling(HALVES, repetition_penalty=2.0)
    found = draws([4.0, 2.0, -1.0, -2.0], halved, seen=seen[:1])
    weights = torch.tensor([4.0, 4.0, 0.25, 0.25], dtype=torch.float64)
    expected = weights / weights.sum()
    assert DRAWS * ((found - expected).square() / expected).sum() < 3 + 5 * math.sqrt(2 * 3)


def test_tokens_seen_are_bits() -> None:
    ids = [[0, 31, 32, 70], [], [69, 69]]
    seen = pack_seen(ids, 71)
    assert seen.dtype == torch.int32
    assert seen.shape == (3, 3)
    expected = torch.zeros(3, 71, dtype=torch.bool)
    for row, tokens in enumerate(ids):
        expected[row, tokens] = True
    assert torch.equal(unpack_seen(seen, 71), expected)
    mark_seen(seen, torch.tensor([31, 63, 5]))
    expected[[1, 2], [63, 5]] = True
    assert torch.equal(unpack_seen(seen, 71), expected)


def test_log_probabilities_are_the_models_own() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    logits[1, 7] = NAN
    seen = pack_seen([[int(row.nan_to_num(-INF).argmax())] for row in logits], 50)
    rows = rows_of([Sampling(0.3, top_k=2, repetition_penalty=9.0)] * 3, seen=seen)
    found = sample(logits, rows, log_probs=4)
    exact = logits.nan_to_num(-INF).double().log_softmax(1)
    assert found.log_probs is not None
    assert found.top_tokens is not None
    assert found.top_log_probs is not None
    assert torch.equal(found.tokens, choose(logits, rows))
    assert torch.allclose(found.log_probs.double(), exact.gather(1, found.tokens[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(found.top_log_probs.double(), exact.topk(4).values, atol=1e-5)
    assert torch.equal(found.top_tokens, exact.topk(4).indices)
    of_chosen = sample(logits, rows, log_probs=0)
    assert of_chosen.top_tokens is not None
    assert of_chosen.top_tokens.shape == (3, 0)
    assert sample(logits, rows).log_probs is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", NAN),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", NAN),
        ("repetition_penalty", 0.0),
        ("seed", 2**63),
    ],
)
def test_settings_that_mean_nothing_are_refused(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"sampling: {name} must be .* not "):
        Sampling(**{name: value})  # type: ignore[arg-type]
