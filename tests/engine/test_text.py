"""Text that is shown: stop strings against the plain definition, however the text is cut into pieces."""

from __future__ import annotations

import random
from typing import Any

import pytest

from futransformer.engine.text import TextBuilder


class Pieces:
    """Stands in for a TextStream whose tokens are pieces of a text."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self.pieces, self._rest = pieces, rest

    def add(self, token: int) -> str:
        return self.pieces[token]

    def rest(self) -> str:
        return self._rest


def run(pieces: list[str], stop: list[str], rest: str = "") -> tuple[list[str], str | None]:
    """What is shown, piece by piece, and what stopped it."""
    stream: Any = Pieces(pieces, rest)
    builder = TextBuilder(stream, stop)
    shown = []
    for token in range(len(pieces)):
        shown.append(builder.add(token))
        if builder.stopped_by is not None:
            break
    return [*shown, builder.rest()], builder.stopped_by


@pytest.mark.parametrize(
    ("pieces", "stop", "shown", "stopped_by"),
    [
        (["ab", "cd"], ["bc"], ["a", "", ""], "bc"),
        (["ab", "d"], ["bc"], ["a", "bd", ""], None),
        (["ab"], ["bc"], ["a", "b"], None),
        (["a", "a", "a", "b"], ["aab"], ["", "", "a", "", ""], "aab"),
        (["xyz"], ["z", "yz"], ["x", ""], "yz"),
        (["", "a", ""], ["b"], ["", "a", "", ""], None),
        (["a\n", "\n", "b"], ["\n\n"], ["a", "", ""], "\n\n"),
    ],
)
def test_text_up_to_a_stop_string(pieces: list[str], stop: list[str], shown: list[str], stopped_by: str | None) -> None:
    assert run(pieces, stop) == (shown, stopped_by)


def test_what_was_never_completed_comes_at_the_end() -> None:
    assert run(["ab"], ["bc"], rest="?") == (["a", "b?"], None)


def test_before_min_tokens_nothing_is_looked_for() -> None:
    stream: Any = Pieces(["a", "b", "a", "b"])
    builder = TextBuilder(stream, ["ab"])
    assert [builder.add(token, look_for_stop=token >= 2) for token in range(4)] == ["a", "b", "", ""]
    assert builder.stopped_by == "ab"


def test_any_cut_of_any_text_ends_at_the_first_stop_string() -> None:
    draw = random.Random(2)
    stopped = 0
    for _ in range(3000):
        text = "".join(draw.choice("ab") for _ in range(draw.randrange(1, 14)))
        stop = ["".join(draw.choice("ab") for _ in range(draw.randrange(2, 6))) for _ in range(draw.randrange(1, 3))]
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(4))
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        shown, stopped_by = run(pieces, stop)
        # the one that is complete first, in pieces; of those in one piece the one that begins first
        ends = [text.find(each) + len(each) for each in stop if each in text]
        if not ends:
            assert ("".join(shown), stopped_by) == (text, None)
            continue
        stopped += 1
        seen = "".join(pieces[: len(shown) - 1])
        assert min(ends) <= len(seen), "a stop string was complete, and the text went on"
        assert len(seen) - len(pieces[len(shown) - 2]) < min(ends), "it ended before one was complete"
        assert stopped_by in stop
        assert "".join(shown) == text[: min(seen.find(each) for each in stop if each in seen)]
    assert 500 < stopped < 2500
