"""Choosing next tokens: repetition penalty, temperature, top-k, top-p, min-p and a seeded draw, in plain PyTorch.

What vLLM does, in its order, on rows [B, vocab_size] of float32 logits:

| step | |
| --- | --- |
| repetition penalty r | a logit of a token that stands in prompt or output: divided by r if positive, else times r |
| temperature T | 0: the largest logit, the lowest index among equals, and nothing that follows; else logits / T |
| top-k | tokens below the k-th largest are out |
| top-p | of what is left, the fewest of the largest that hold p of the probability stay |
| min-p | tokens less likely than p times the likeliest are out |
| draw | argmax(log p + g), g Gumbel noise of (seed, position, token): a sample of p |

Equal logits stay or go together. NaN is never chosen while there is a number; a row of no logit above -inf gives what a
greedy one does.

**The same choice everywhere.** Every step is specified to the bit, so that CPU, GPU and the generated kernel
(sampling.cuh) choose the same token of the same logits: single float32 multiplications and additions, each rounded;
log-probabilities in fixed point (``steps_below``), probabilities as integers (``masses``), whose sums have no order;
and noise by counting (``philox``), not by drawing. A row's choice depends on its own logits, settings, seed and
position alone: neither on its place in a batch nor on what else is in it, nor on what was drawn before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from futransformer.generator.errors import InputError

LOG2_E = 1.44269504088896341
STEPS = 1 << 18  # in which log2 of a probability is counted: float32 has as many between two halves of a logit of 16
OUT_OF_REACH = (1 << 24) - 1  # steps below the likeliest from which no noise lifts a token above that
MASS_BITS = 30  # the likeliest token's mass is 2^30, so that a vocabulary's sum fits float64 exactly
EXP2 = (
    0.693151295,
    0.240164444,
    0.0557999127,
    0.00901702885,
    0.00186713075,
)  # 2^f = 1 + f (c0 + f (c1 + ..)), to 2^-23
LOG2 = (1.4426949, -0.721352458, 0.480931163, -0.360263467, 0.28686887, -0.248322859, 0.235709682, -0.149733156)
ROOT_HALF = 0x3F3504F3  # the bits of sqrt(1/2) in float32
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Sampling:
    """How one sequence's tokens are chosen; the defaults draw from the model's own distribution."""

    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, fits, want in (
            ("temperature", 0 <= self.temperature < math.inf, "0 (the likeliest token) or a positive number"),
            ("top_k", self.top_k >= -1, "a count, or 0 or -1 for all tokens"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a positive number"),
            ("seed", -(2**63) <= self.seed < 2**63, "an integer of 64 bits"),
        ):
            if not fits:
                raise InputError(f"sampling: {name} must be {want}, not {getattr(self, name)}")

    @property
    def greedy(self) -> bool:
        """Whether this is the likeliest token of the model's own logits."""
        return self.temperature == 0 and self.repetition_penalty == 1


GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class SamplingRows:
    """What ``sample`` reads of B rows, each a tensor on the logits' device."""

    temperature: Tensor  # float32 [B]
    top_k: Tensor  # int32 [B]; below 1: all
    top_p: Tensor  # float32 [B]; from 1 on: all
    min_p: Tensor  # float32 [B]
    repetition_penalty: Tensor  # float32 [B]
    seed: Tensor  # int64 [B]
    position: Tensor  # int32 [B]: where in its sequence the token will stand
    seen: Tensor | None = None  # int32 [B, ceil(vocab_size / 32)]: tokens to penalise (``pack_seen``); None: none

    @classmethod
    def of(cls, settings: Sequence[Sampling], position: Tensor, seen: Tensor | None = None) -> SamplingRows:
        """The settings of B sequences on the device of ``position`` int32 [B]."""
        device = position.device

        def column(values: Iterable[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(list(values), dtype=dtype).to(device)

        return cls(
            temperature=column((each.temperature for each in settings), torch.float32),
            top_k=column((min(each.top_k, 2**31 - 1) for each in settings), torch.int32),
            top_p=column((each.top_p for each in settings), torch.float32),
            min_p=column((each.min_p for each in settings), torch.float32),
            repetition_penalty=column((each.repetition_penalty for each in settings), torch.float32),
            seed=column((each.seed for each in settings), torch.int64),
            position=position,
            seen=seen,
        )

    def keep(self, rows: Tensor) -> SamplingRows:
        """The same of these rows, int64 [rows]."""
        kept = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: tensor[rows] for name, tensor in kept.items() if tensor is not None})


class Sampled(NamedTuple):
    """The chosen tokens of B rows; log-probabilities, if asked for, are the model's own: before any step above."""

    tokens: Tensor  # int64 [B]
    log_probs: Tensor | None = None  # float32 [B], of the chosen tokens
    top_tokens: Tensor | None = None  # int64 [B, n], the likeliest
    top_log_probs: Tensor | None = None  # float32 [B, n]


def sample(logits: Tensor, rows: SamplingRows, *, log_probs: int | None = None) -> Sampled:
    """Choose a token of each row of logits [B, vocab_size]; nothing synchronises.

    ``log_probs`` asks for log-probabilities of the chosen token and of that many likeliest (0: of the chosen alone).
    """
    tokens = choose(logits, rows)
    return Sampled(tokens) if log_probs is None else with_log_probs(logits, tokens, log_probs)


def with_log_probs(logits: Tensor, tokens: Tensor, count: int) -> Sampled:
    """Tokens int64 [B] that were chosen of these logits, with their log-probabilities and those of the likeliest."""
    of_all = torch.where(logits.isnan(), -torch.inf, logits.float()).log_softmax(1)
    top, top_tokens = of_all.topk(min(count, logits.shape[1]), 1)
    return Sampled(tokens, of_all.gather(1, tokens[:, None])[:, 0], top_tokens, top)


def choose(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The tokens of ``sample``, int64 [B]."""
    penalised = penalise(logits, rows)
    largest = torch.where(penalised.isnan(), -torch.inf, penalised).amax(1, keepdim=True)
    greedy = lowest_of_largest(penalised, largest)
    steps = steps_below(penalised, largest, rows.temperature)
    mass = masses(steps)
    inside = steps <= most_steps(steps, mass, rows)[:, None]
    inside &= mass.double() >= (rows.min_p.double() * 2.0**MASS_BITS)[:, None]
    noisy = steps.float() * -(1 / STEPS) + gumbel(rows.seed, rows.position, logits.shape[1])
    noisy = torch.where(inside, noisy, -torch.inf)
    drawn = lowest_of_largest(noisy, noisy.amax(1, keepdim=True))
    certain = (rows.temperature == 0) | (largest[:, 0] == -torch.inf)
    return torch.where(certain, greedy, drawn)


def penalise(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Logits in float32, those of tokens seen before made less likely."""
    logits = logits.float()
    if rows.seen is None:
        return logits
    penalty = rows.repetition_penalty[:, None]
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(unpack_seen(rows.seen, logits.shape[1]), penalised, logits)


def lowest_of_largest(values: Tensor, largest: Tensor) -> Tensor:
    """The lowest index of each row's largest value, 0 where it is none's; int64 [B]."""
    return (values == largest).int().argmax(1)


def steps_below(logits: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """How far log2 of each token's probability lies below the likeliest's, rounded down to whole STEPS: int64.

    OUT_OF_REACH for what is farther, and for NaN; anything at T = 0.
    """
    factor = torch.full_like(temperature, LOG2_E) / temperature
    steps = torch.where(logits == largest, 0.0, (logits - largest) * factor[:, None]) * -STEPS
    return torch.where(steps < OUT_OF_REACH, steps, OUT_OF_REACH).long()


def masses(steps: Tensor) -> Tensor:
    """2^-(steps / STEPS) in units of 2^-MASS_BITS, rounded down: int64."""
    halvings = (steps + STEPS - 1) // STEPS
    power = exp2_of((halvings * STEPS - steps).float() * (1 / STEPS))
    return (power * 2.0**MASS_BITS).long() >> halvings.clamp(max=63)


def exp2_of(fraction: Tensor) -> Tensor:
    """2^fraction of 0 .. 1, one rounding an operation."""
    power = torch.full_like(fraction, EXP2[-1])
    for coefficient in (*EXP2[-2::-1], 1.0):
        power = power * fraction + coefficient
    return power


def log2_of_one_plus(fraction: Tensor) -> Tensor:
    """log2(1 + fraction) of sqrt(1/2) - 1 .. sqrt(2) - 1, one rounding an operation."""
    power = torch.full_like(fraction, LOG2[-1])
    for coefficient in LOG2[-2::-1]:
        power = power * fraction + coefficient
    return power * fraction


def log2_of(values: Tensor) -> Tensor:
    """log2 of positive normal float32 numbers."""
    bits = values.view(torch.int32)
    exponent = (bits - ROOT_HALF) >> 23
    mantissa = (bits - (exponent << 23)).view(torch.float32)
    return log2_of_one_plus(mantissa - 1) + exponent.float()


def most_steps(steps: Tensor, mass: Tensor, rows: SamplingRows) -> Tensor:
    """The most steps below the likeliest that top-k, and then top-p, leave in; int64 [B], below OUT_OF_REACH."""
    ordered, order = steps.sort(dim=1)
    vocab_size = steps.shape[1]
    last = torch.where(rows.top_k >= 1, rows.top_k.clamp(max=vocab_size), vocab_size).long() - 1
    of_k = ordered.gather(1, last[:, None])
    running = mass.gather(1, order).cumsum(1).double()
    held = torch.where(ordered <= of_k, running, 0).amax(1)  # by what top-k leaves
    enough = running >= (held * rows.top_p.double())[:, None]
    of_p = ordered.gather(1, enough.int().argmax(1, keepdim=True))
    most = torch.where(rows.top_p[:, None] < 1, of_p, of_k)
    return most.clamp(max=OUT_OF_REACH - 1)[:, 0]


def gumbel(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """-log2(-log2 u), u uniform in steps of 2^-31: float32 [B, vocab_size], Gumbel noise over log(2).

    n = 2^32 u is odd. Above sqrt(1/2) u is taken as 1 less (2^32 - n), for what is left of it would be rounded away.
    """
    n = philox(seed, position, vocab_size) | 1
    near_one = n > 0xB504F333
    below = log2_of_one_plus(-((2**32 - n).float() * 2.0**-32))
    elsewhere = log2_of(n.float() * 2.0**-32)
    return -log2_of(-torch.where(near_one, below, elsewhere))


def philox(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Philox4x32-10 (Salmon et al., 2011): 32 bits for each token, int64 [B, vocab_size].

    Token t has word t % 4 of the counter (t // 4, position, 0, 0) under the key of the seed's two halves.
    """
    quads = -(-vocab_size // 4)
    zero = torch.zeros(len(seed), quads, dtype=torch.int64, device=seed.device)
    a = torch.arange(quads, device=seed.device) + zero
    b, c, d = zero + (position.long() & _WORD)[:, None], zero, zero
    key = [seed[:, None] & _WORD, seed[:, None] >> 32 & _WORD]
    for _ in range(PHILOX_ROUNDS):
        first, second = a * PHILOX_MULTIPLIERS[0], c * PHILOX_MULTIPLIERS[1]  # modulo 2^64: both words are right
        a, b = (second >> 32 & _WORD) ^ b ^ key[0], second & _WORD
        c, d = (first >> 32 & _WORD) ^ d ^ key[1], first & _WORD
        key = [half + weyl & _WORD for half, weyl in zip(key, PHILOX_WEYL, strict=True)]
    return torch.stack((a, b, c, d), 2).flatten(1)[:, :vocab_size]


def pack_seen(tokens: Sequence[Iterable[int]], vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """The tokens of each sequence as bits, int32 [B, ceil(vocab_size / 32)]: bit t % 32 of word t // 32."""
    words = -(-vocab_size // 32)
    mask = torch.zeros(len(tokens), words * 32, dtype=torch.int64)
    for row, ids in enumerate(tokens):
        mask[row, torch.tensor(list(ids), dtype=torch.int64)] = 1
    return (mask.view(len(tokens), words, 32) << torch.arange(32)).sum(2).to(torch.int32).to(device)


def unpack_seen(seen: Tensor, vocab_size: int) -> Tensor:
    """The same as bool [B, vocab_size]."""
    bits = seen[:, :, None] >> torch.arange(32, dtype=torch.int32, device=seen.device) & 1
    return bits.flatten(1)[:, :vocab_size].bool()


def mark_seen(seen: Tensor, tokens: Tensor) -> None:
    """Add one token [B] to each row of ``seen``."""
    word = (tokens.long() // 32)[:, None]
    bit = torch.ones_like(seen[:, :1]) << (tokens.int() % 32)[:, None]
    seen.scatter_(1, word, seen.gather(1, word) | bit)
