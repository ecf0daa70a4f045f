"""INT4 pages of the KV cache: where a code of a token stands, in the order in which decode attention multiplies.

A page of one key/value head is ``KvFormat.page_bytes`` bytes: K, then V, each its codes, then scales float16 [groups,
64 tokens], then minima likewise. Codes are words of 32 bits, [4 tiles of 16 tokens][D / 64][32 lanes][4 words], so that
a lane's 16 bytes are operands A of mma.sync.m16n8k16; lane = 4 g + t.

*K*, tokens x features. Rows g and g + 8 of a tile are its tokens 2 g and 2 g + 1. A word holds eight features of *one*
token, of 32: nibble i is feature 8 t + 2 i, nibble i + 4 feature 8 t + 2 i + 1, as in INT4 weights. A lane's words are
the two tokens' of one 32 features, then of the next.

*V*, features x tokens. A word is one of four steps of 16 features: byte b is token 4 t + b of the tile, its low nibble
feature g of the step, its high one feature g + 8. A shift by 0, 8, 4 and 12 leaves tokens 4 t + {0, 2} and {1, 3} of
feature g, then of g + 8, in the low nibbles of the halves: registers 0, 2, 1 and 3. What P has in rows g and g + 8 is
then in the order of V's tokens.

So an append is lossless: a token owns words of K, bytes of V and halves of the scales, and none of them holds any
other's. It may be written by any thread, without reading.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from futransformer.generator.kv_format import KvFormat
from futransformer.generator.specs import PAGE_SIZE
from futransformer.quantize.kv_int4 import Int4Kv

_TILE = 16


@cache
def key_nibbles(head_dim: int) -> Tensor:
    """Where the code of each token and feature of K stands, in nibbles from the page's start: int64 [64, D]."""
    token, feature = _tokens_and_features(head_dim)
    row, group, inside = token % _TILE, feature // 32, feature % 32
    lane, word = row // 2 * 4 + inside // 8, group % 2 * 2 + row % 2
    return _word_at(token, group // 2, lane, word, head_dim) * 8 + inside % 2 * 4 + inside % 8 // 2


@cache
def value_nibbles(head_dim: int) -> Tensor:
    """The same of V, from the start of V."""
    token, feature = _tokens_and_features(head_dim)
    row, step, inside = token % _TILE, feature // 16, feature % 16
    lane = inside % 8 * 4 + row // 4
    return _word_at(token, step // 4, lane, step % 4, head_dim) * 8 + row % 4 * 2 + inside // 8


def pack_page(keys: Int4Kv, values: Int4Kv, kv_format: KvFormat) -> Tensor:
    """The bytes of one page and head, uint8 [page bytes], from codes [64, D]."""
    parts = []
    for part, nibbles in ((keys, key_nibbles), (values, value_nibbles)):
        places = nibbles(part.codes.shape[-1]).to(part.codes.device)
        spread = torch.empty(part.codes.numel(), dtype=torch.uint8, device=part.codes.device)
        spread[places.flatten()] = part.codes.flatten()
        parts.append(spread[0::2] | spread[1::2] << 4)
        parts += [t.T.contiguous().view(torch.uint8).flatten() for t in (part.scales, part.minima) if t is not None]
    page = torch.cat(parts)
    assert page.numel() == kv_format.page_bytes(keys.codes.shape[-1])
    return page


def unpack_page(page: Tensor, head_dim: int, kv_format: KvFormat) -> tuple[Int4Kv, Int4Kv]:
    """K and V of a packed page, exactly."""
    keys, values = page.view(2, kv_format.part_bytes(head_dim))
    return _unpack(keys, key_nibbles(head_dim), kv_format), _unpack(values, value_nibbles(head_dim), kv_format)


def _unpack(part: Tensor, places: Tensor, kv_format: KvFormat) -> Int4Kv:
    codes, rest = part[: places.numel() // 2], part[places.numel() // 2 :]
    spread = torch.stack((codes & 15, codes >> 4), 1).flatten()
    grouped = rest.clone().view(torch.float16).view(-1, kv_format.groups(places.shape[1]), PAGE_SIZE).transpose(1, 2)
    minima = grouped[1].contiguous() if kv_format.minimum else None
    return Int4Kv(spread[places.to(part.device)], grouped[0].contiguous(), minima)


def _tokens_and_features(head_dim: int) -> tuple[Tensor, Tensor]:
    return torch.arange(PAGE_SIZE)[:, None], torch.arange(head_dim)[None]


def _word_at(token: Tensor, load: Tensor, lane: Tensor, word: Tensor, head_dim: int) -> Tensor:
    return ((token // _TILE * (head_dim // 64) + load) * 32 + lane) * 4 + word
