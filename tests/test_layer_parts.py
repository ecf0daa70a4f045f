"""Parts of layers as a person writes them."""

from __future__ import annotations

import pytest

from futransformer.generator.errors import InputError
from futransformer.layer_parts import Part, all_parts, format_parts, parse_parts


@pytest.mark.parametrize(
    ("text", "parts", "formatted"),
    [
        ("0", [Part(0, "attention"), Part(0, "mlp")], "0"),
        (" 11.mlp,2.attention , 2.mlp", [Part(2, "attention"), Part(2, "mlp"), Part(11, "mlp")], "2, 11.mlp"),
        ("3.attention,3.attention", [Part(3, "attention")], "3.attention"),
    ],
)
def test_parts_are_read_and_written(text: str, parts: list[Part], formatted: str) -> None:
    assert parse_parts(text, 12) == frozenset(parts)
    assert format_parts(parts) == formatted
    assert parse_parts(formatted, 12) == frozenset(parts)


def test_every_part_of_a_model() -> None:
    assert len(all_parts(30)) == 60
    assert format_parts(all_parts(3)) == "0, 1, 2"
    assert format_parts([]) == ""


@pytest.mark.parametrize("text", ["", "12", "-1", "1,", "0.o", "1-3", "auto"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"none of the parts of 12 layers: give 0 to 11"):
        parse_parts(text, 12)
