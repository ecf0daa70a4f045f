"""A tiny model that chats, and servers on loopback."""

from __future__ import annotations

from pathlib import Path

import pytest

from futransformer.tokenizer import Tokenizer
from tests.conftest import make_tiny_model

TEMPLATE = (
    "<s>{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "{{ message.role[0] }}:{{ message.content }};{% endfor %}a:"
)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a template of several turns."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-chat", tied=False, chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def tokenizer(chat_model: Path) -> Tokenizer:
    """The tokenizer of that model: a token a byte."""
    return Tokenizer(chat_model)
