"""Texts that figures are published on, read through Hugging Face's `datasets` library, which is not required otherwise.

WikiText-2 (raw): the rows of a split, joined by two line ends, as published perplexities have it.
"""

from __future__ import annotations

from typing import Literal

from futransformer.generator.errors import InputError

WIKITEXT2 = "wikitext2"
Split = Literal["train", "validation", "test"]


def read_wikitext2(split: Split) -> str:
    """A split of WikiText-2, from the library's cache or the hub; InputError says how to do without."""
    instead = f"or name a file that holds the text in place of {WIKITEXT2}"
    try:
        from datasets import load_dataset  # noqa: PLC0415 - optional
    except ImportError as error:
        raise InputError(
            f"{WIKITEXT2} is read by the datasets library, which is not installed; run: pip install datasets, {instead}"
        ) from error
    try:
        rows = load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split=split)
    except Exception as error:  # the library raises whatever its transports do
        raise InputError(
            f"{WIKITEXT2} cannot be fetched: {error}; check the connection to its hub, {instead}"
        ) from error
    return "\n\n".join(rows["text"])
