"""Texts that have a name: WikiText-2 by the ``datasets`` library, joined as published perplexities have it."""

from __future__ import annotations

from futransformer.generator.errors import InputError

WIKITEXT2 = "wikitext2"


def read_wikitext2(split: str) -> str:
    """A split ("train", "validation", "test") of WikiText-2 raw, its rows joined by blank lines."""
    instead = "give a file of UTF-8 text instead"
    try:
        from datasets import load_dataset  # noqa: PLC0415 - not required: most machines read files
    except ImportError as error:
        raise InputError(f"{WIKITEXT2} is read by the datasets library: pip install datasets, or {instead}") from error
    try:
        rows = load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split=split)
    except Exception as error:  # whatever a hub that cannot be reached raises
        raise InputError(f"{WIKITEXT2} cannot be fetched ({error}): {instead}") from error
    return "\n\n".join(rows["text"])
