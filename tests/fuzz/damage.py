"""What may be wrong with a file: JSON with absurd values in any place, and bytes that are cut, flipped or inserted."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

from hypothesis import strategies as st

from futransformer.generator.errors import FuTransformerError

T = TypeVar("T")
Json = Any
MOST_MESSAGE = 3000  # characters: a message is read by a person, whatever the file holds
DEEP = 100_000  # levels of nesting: Python's own reader gives up after some thousands
NUMBERS: list[Json] = [
    *(0, -1, 1, 2, 3, 7, 8, 64, 128, 1000, 2**29, 2**31, 2**32, 2**63, 2**64, 10**12, 10**30, 10**400, -(10**18)),
    *(0.0, -0.0, 0.5, 1.0, 1e-5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
]
TEXTS: list[Json] = [
    *("", ".", "..", "/", "../x", "/etc/passwd", "x\0y", "\ud800", "x" * 300, "ü", "0", "null", "int4", "bf16"),
    *("default", "llama3", "llama", "mistral", "gptq", "gptq_v2", "awq", "compressed-tensors", "fp8", "group"),
    *("channel", "block", "Linear", "float", "int", "pack-quantized", "float-quantized", "static", "dynamic"),
    *("re:(", "re:" + "(" * 500, "re:a{99999999999999999999}", "re:.*"),
]
OTHERS: list[Json] = [None, True, False, [], {}, [[]], [None], {"": None}, [1, 2], [128, 128], ["x"], [10**30, 10**30]]
values = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.sampled_from(OTHERS),
    st.integers(),
    st.floats(),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
)


def unless_refused(read: Callable[[], T], kind: type[FuTransformerError] = FuTransformerError) -> T | None:
    """What ``read`` gives; None where it refuses by a typed error that can be read. Any other exception is a fault."""
    try:
        return read()
    except kind as error:
        message = str(error)
    assert 0 < len(message) < MOST_MESSAGE
    return None


def places(content: Json, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in a JSON value but itself."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [path for key, value in items for path in [(*at, key), *places(value, (*at, key))]]


@st.composite
def edited(draw: st.DrawFn, content: Json, keys: tuple[str, ...] = ()) -> Json:
    """``content`` with one to three values replaced, removed, moved or added; ``keys``: names worth adding."""
    content = deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        known = places(content)
        if not known:
            break
        *path, key = draw(st.sampled_from(known))
        holder = content
        for step in path:
            holder = holder[step]
        match draw(st.sampled_from(("replace", "replace", "remove", "move", "add"))):
            case "replace":
                holder[key] = deepcopy(draw(values))
            case "remove":
                del holder[key]
            case "move":
                other = content
                for step in draw(st.sampled_from(known)):
                    other = other[step] if isinstance(other, (dict, list)) and _has(other, step) else other
                holder[key] = deepcopy(other)
            case _ if isinstance(holder, dict):
                holder[draw(st.sampled_from(keys) if keys else st.text(max_size=6))] = deepcopy(draw(values))
    return content


def _has(holder: Json, step: Any) -> bool:
    return step in holder if isinstance(holder, dict) else isinstance(step, int) and step < len(holder)


@st.composite
def json_text(draw: st.DrawFn, content: st.SearchStrategy[Json]) -> bytes:
    """A file of it: mostly as it stands, sometimes with a key twice, nested without end, or damaged."""
    text = json.dumps(draw(content))  # a lone surrogate stays an escape
    match draw(st.sampled_from(("plain",) * 6 + ("twice", "deep", "digits", "bytes"))):
        case "twice" if text.startswith("{") and len(text) > 2:
            key = draw(st.sampled_from([*json.loads(text)]))
            text = f"{text[:-1]}, {json.dumps(key)}: {json.dumps(draw(values))}}}"
        case "deep":
            depth = draw(st.sampled_from((50, 900, 3000, DEEP)))
            nested = draw(st.sampled_from(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth)))
            text = draw(st.sampled_from((nested, f'{text[:-1]}, "deep": {nested}}}')))
            at = draw(st.sampled_from([*json.loads(json.dumps(draw(content)))] or [""])) if text[0] == "{" else ""
            text = text.replace('"deep"', json.dumps(at))
        case "digits":
            text = text.replace("1", "1" * draw(st.sampled_from((500, 4300, 5000))), 1)
        case "bytes":
            return draw(damaged(text.encode()))
    return text.encode()


@st.composite
def damaged(draw: st.DrawFn, content: bytes, within: int | None = None) -> bytes:
    """``content`` with some faults among its first ``within`` bytes: cut, bits flipped, bytes put in or overwritten."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, min(len(content), within or len(content))))
        match draw(st.sampled_from(("cut", "flip", "flip", "insert", "overwrite"))):
            case "cut":
                content = content[:at]
            case "flip":
                flipped = bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in content[at : at + 1])
                content = content[:at] + flipped + content[at + 1 :]
            case kind:
                put = draw(st.binary(min_size=1, max_size=9))
                content = content[:at] + put + content[at + (len(put) if kind == "overwrite" else 0) :]
    return content
