"""Pages of the INT4 copy of the KV cache: where a code of a token stands, in the order in which decode multiplies.

A page of one key/value head is ``KvFormat.page_bytes`` bytes: K, then V, each its codes, then scales float16 [groups,
64 tokens], then minima likewise. Codes are words of 32 bits, [4 tiles of 16 tokens][D / 64][32 lanes][4 words], so that
a lane's 16 bytes are operands A of mma.sync.m16n8k16; lane = 4 g + t.

*K*, tokens x features. Rows g and g + 8 of a tile are its tokens 2 g and 2 g + 1. A word holds eight features of *one*
token, of 32, at *positions* n = 0 .. 7: feature 16 (n / 4) + 4 t + n % 4. Nibble i is position 2 i, nibble i + 4 is
position 2 i + 1, so that `word >> 4 i & 0x000f000f` is a pair: i = 0, 1 are registers a0 and a2 of the first sixteen
features, i = 2, 3 of the others. Operand B of lane t is features 4 t .. 4 t + 3 of the sixteen, and the positions are
those that a lane of prefill's accumulators has. A lane's words are its two tokens' of 32 features, then of the
next 32.

*V*, features x tokens. A word is one of four steps of 16 features: byte b is token 4 t + b of the tile, its low nibble
feature 2 g of the step, its high one feature 2 g + 1: rows g and g + 8 of the operand. A shift by 0, 8, 4 and 12
leaves tokens 4 t + {0, 2} and {1, 3} of feature 2 g, then of 2 g + 1, in the low nibbles of the halves: registers 0, 2,
1 and 3. What P has in rows g and g + 8 is then in the order of V's tokens.

So an append is lossless: a token owns words of K, bytes of V and halves of the scales, and none of them holds any
other's. It may be written by any thread, without reading.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from futransformer.generator.kv_format import PAGE_SIZE, SCALE_BYTES, KvFormat
from futransformer.quantize.kv_int4 import Int4Kv

_TILE = 16


@cache
def key_nibbles(head_dim: int) -> Tensor:
    """Where the code of each token and feature of K stands, in nibbles from the page's start: int64 [64, D]."""
    token, feature = _tokens_and_features(head_dim)
    row, group, inside = token % _TILE, feature // 32, feature % 32
    lane, word = row // 2 * 4 + inside % 16 // 4, group % 2 * 2 + row % 2
    position = inside // 16 * 4 + inside % 4
    return _word_at(token, group // 2, lane, word, head_dim) * 8 + position % 2 * 4 + position // 2


@cache
def value_nibbles(head_dim: int) -> Tensor:
    """The same of V, from the start of V."""
    token, feature = _tokens_and_features(head_dim)
    row, step, inside = token % _TILE, feature // 16, feature % 16
    lane = inside // 2 * 4 + row // 4
    return _word_at(token, step // 4, lane, step % 4, head_dim) * 8 + row % 4 * 2 + inside % 2


@cache
def token_bytes(head_dim: int, kv_format: KvFormat) -> Tensor:
    """Where the bytes of each token stand in a page: int64 [64, bytes], of K codes, scales and minima, then of V."""
    token, _ = _tokens_and_features(head_dim)
    halves = torch.arange(kv_format.groups(head_dim) * (2 if kv_format.minimum else 1)).repeat_interleave(2)
    scales = PAGE_SIZE * head_dim // 2 + (halves * PAGE_SIZE + token) * SCALE_BYTES + torch.arange(len(halves)) % 2
    keys, values = (_byte_places(nibbles(head_dim))[1] for nibbles in (key_nibbles, value_nibbles))
    return torch.cat((keys, scales, *(kv_format.part_bytes(head_dim) + each for each in (values, scales))), 1)


def store_tokens(pages: Tensor, slots: Tensor, keys: Int4Kv, values: Int4Kv, kv_format: KvFormat) -> None:
    """Write tokens [T, heads, D] to their slots [T] of ``pages`` [num_pages, heads, page bytes], and nothing beside."""
    head_dim = keys.codes.shape[-1]
    stored = []
    for part, nibbles in ((keys, key_nibbles), (values, value_nibbles)):
        low, high = part.codes[..., _byte_places(nibbles(head_dim))[0].to(pages.device)].unbind(-1)
        halves = (each.contiguous().view(torch.uint8) for each in (part.scales, part.minima) if each is not None)
        stored += [low | high << 4, *halves]
    page, heads = (slots // PAGE_SIZE)[:, None, None], torch.arange(pages.shape[1], device=pages.device)[:, None]
    places = token_bytes(head_dim, kv_format).to(pages.device)[slots % PAGE_SIZE]
    pages[page, heads, places[:, None]] = torch.cat(stored, -1)


def pack_page(keys: Int4Kv, values: Int4Kv, kv_format: KvFormat) -> Tensor:
    """The bytes of one page and head, uint8 [page bytes], from codes [64, D]."""
    page_bytes, device = kv_format.page_bytes(keys.codes.shape[-1]), keys.codes.device
    page = torch.empty(1, 1, page_bytes, dtype=torch.uint8, device=device)
    key_rows, value_rows = (part.map(lambda features: features[:, None]) for part in (keys, values))
    store_tokens(page, torch.arange(PAGE_SIZE, device=device), key_rows, value_rows, kv_format)
    return page.flatten()


def unpack_pages(pages: Tensor, head_dim: int, kv_format: KvFormat) -> tuple[Int4Kv, Int4Kv]:
    """K and V of packed pages [..., page bytes], exactly: codes [..., 64, D]."""
    keys, values = torch.split(pages, kv_format.part_bytes(head_dim), -1)
    return _unpack(keys, key_nibbles(head_dim), kv_format), _unpack(values, value_nibbles(head_dim), kv_format)


def _unpack(part: Tensor, places: Tensor, kv_format: KvFormat) -> Int4Kv:
    code_bytes = places.numel() // 2
    codes = torch.stack((part[..., :code_bytes] & 15, part[..., :code_bytes] >> 4), -1).flatten(-2)
    halves = part[..., code_bytes:].contiguous().view(torch.float16)
    grouped = halves.reshape(*part.shape[:-1], -1, kv_format.groups(places.shape[1]), PAGE_SIZE).transpose(-1, -2)
    scales, *minima = (each.contiguous() for each in grouped.unbind(-3))
    return Int4Kv(codes[..., places.to(part.device)], scales, minima[0] if minima else None)


def _byte_places(nibbles: Tensor) -> tuple[Tensor, Tensor]:
    """The two features of each byte of a token [D / 2, 2], which are every token's, and where it stands [64, D / 2]."""
    features = nibbles[0].argsort().view(-1, 2)
    return features, nibbles[:, features[:, 0]] // 2


def _tokens_and_features(head_dim: int) -> tuple[Tensor, Tensor]:
    return torch.arange(PAGE_SIZE)[:, None], torch.arange(head_dim)[None]


def _word_at(token: Tensor, load: Tensor, lane: Tensor, word: Tensor, head_dim: int) -> Tensor:
    return ((token // _TILE * (head_dim // 64) + load) * 32 + lane) * 4 + word
