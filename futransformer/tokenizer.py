"""Text to tokens and back: the folder's own Hugging Face tokenizer, read from disk alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

from futransformer.generator.errors import CheckpointError, InputError

OPEN = 16  # tokens without a character, of which the first are given up: the backend decodes them with every token
CONTEXT = 8  # tokens before a text that are decoded with it: no character or word of a tokenizer is longer


class Message(TypedDict):
    """One turn of a conversation."""

    role: str  # "system", "user" or "assistant", where the model's template knows it
    content: str


class Tokenizer:
    """A model folder's tokenizer."""

    def __init__(self, folder: Path | str) -> None:
        """Read the tokenizer of a Hugging Face folder."""
        from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds to import; token lists need none of it

        self.folder = Path(os.path.expanduser(folder))
        if not any((self.folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            raise CheckpointError(
                f"{self.folder} holds no tokenizer (tokenizer.json or tokenizer.model); copy it from the model's source"
            )
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:  # transformers raises whatever its parsers raise
            raise CheckpointError(f"{self.folder}: the tokenizer cannot be read: {error}") from error

    @property
    def backend(self) -> Any:
        """The ``tokenizers.Tokenizer`` behind it, which decodes token by token."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise CheckpointError(
                f"{self.folder}: {type(self._tokenizer).__name__} has no fast form, which text token by token needs; "
                "write a tokenizer.json with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        return backend

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that have no text unless it is asked for."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token for token, each in added.items() if each.special)

    def encode(self, text: str) -> list[int]:
        """Tokens of the text as it stands; nothing is added."""
        return self._ids(text, add_special_tokens=False)

    def encode_prompt(self, text: str) -> list[int]:
        """Tokens of a prompt to continue, with the BOS that the tokenizer adds, if it adds one."""
        return self._ids(text, add_special_tokens=True)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # of bytes on the command line that are no text
            raise InputError(f"the text is not UTF-8: character {error.start} is {text[error.start]!r}") from None
        tokens: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return tokens

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._tokenizer.chat_template)

    def encode_chat(self, message: str) -> list[int]:
        """Tokens of a user's message and the opening of the answer, as ``encode_messages`` gives them."""
        return self.encode_messages([{"role": "user", "content": message}])

    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation and the opening of the next answer, by the model's chat template.

        The template writes its own BOS; none is added.
        """
        if not self.can_chat:
            raise InputError(
                f"{self.folder} is a base model: it has no chat template; let it continue text instead (--no-chat), "
                "or use an instruction-tuned model"
            )
        if not messages:
            raise InputError("the conversation is empty: give at least one message")
        for index, message in enumerate(messages):
            if not (isinstance(message, Mapping) and all(isinstance(message.get(k), str) for k in ("role", "content"))):
                raise InputError(f'message {index} is {message!r}, not {{"role": "user", "content": "..."}} of strings')
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program of the model's author
            roles = ", ".join(message["role"] for message in messages)
            raise CheckpointError(
                f"{self.folder}: the chat template refuses messages of {roles}: {error}; send others, or let the model "
                "continue text instead (--no-chat)"
            ) from error
        return self.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the tokens, special ones left out."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def decode_token(self, token: int) -> str:
        """Text of one token by itself, a special one's too."""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text


class TextStream:
    """Turns a growing list of tokens into pieces of text that never split a character.

    A token costs the same however long the text is. After ``context``, tokens that came before (a prompt's last ones),
    the text begins as it does behind them: tokenizers that drop the space at the beginning of a text keep it.
    """

    def __init__(self, tokenizer: Tokenizer, *, context: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        """Start with no tokens; special ones have no text, unless ``skip_special_tokens`` is False."""
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend
        self._skip = skip_special_tokens
        self._silent = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stream = self._begin(list(context[-CONTEXT:]))
        self._tokens: list[int] = []
        self._open: list[int] = []  # tokens since the last piece

    def _begin(self, context: list[int]) -> Any:
        from tokenizers.decoders import DecodeStream  # noqa: PLC0415 - see Tokenizer

        return DecodeStream(context, skip_special_tokens=self._skip)

    def add(self, token: int) -> str:
        """Return the text that this token completes; empty inside a character of several tokens."""
        self._tokens.append(token)
        if token in self._silent:
            return ""
        try:
            piece: str | None = self._stream.step(self._backend, token)
        except Exception:  # what was shown is no beginning of what its tokens give with this one: go on behind it
            self._stream = self._begin([])
            piece = self._stream.step(self._backend, token)
        if piece is None:
            self._open.append(token)
            return self._give_up() if len(self._open) % OPEN == 0 else ""
        if self._open:
            self._open.clear()
        return piece

    def _give_up(self) -> str:
        """Text of the open tokens but the last few, which may become a character; empty if it cannot be cut there."""
        whole = self._decode(self._open)
        for count in range(4, CONTEXT):  # a character has at most four bytes
            shown, kept = self._open[:-count], self._open[-count:]
            text = self._decode(shown)
            if text + self._decode(kept) == whole:
                self._stream, self._open = self._begin(shown[-CONTEXT:]), []
                for token in kept:
                    piece: str | None = self._stream.step(self._backend, token)
                    self._open = [*self._open, token] if piece is None else []
                    text += piece or ""
                return text
        return ""

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._backend.decode(tokens, skip_special_tokens=self._skip)
        return text

    def rest(self) -> str:
        """Return what ``add`` has held back, at the end: a character that was never completed."""
        text = self._decode(self._open)
        self._open.clear()
        return text

    @property
    def text(self) -> str:
        """Everything so far."""
        return self._tokenizer.decode(self._tokens)
