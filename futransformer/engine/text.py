"""From tokens to the text that a request is shown: whole characters only, nothing that may become a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from futransformer.tokenizer import TextStream


class TextBuilder:
    """One text, a token at a time."""

    __slots__ = ("_held", "_inside", "_stop", "_stream", "stopped_by")

    def __init__(self, stream: TextStream | None, stop: Sequence[str] = ()) -> None:
        """``stream`` decodes (None: there is no text), any of ``stop`` ends the text."""
        self._stream = stream
        self._stop = stop
        self._inside = {character for each in stop for character in each[:-1]}
        self._held = ""  # may become a stop string
        self.stopped_by: str | None = None

    def add(self, token: int, *, look_for_stop: bool = True) -> str:
        """Return the text that may now be shown. After it, ``stopped_by`` says whether a stop string ends it."""
        if self._stream is None:
            return ""
        piece = self._stream.add(token)
        if not self._stop or not (piece or self._held):
            return piece
        text, self._held = self._held + piece, ""
        if not look_for_stop:
            return text
        return self._cut(text)

    def rest(self) -> str:
        """Return what ``add`` has held back, at the end: the text that has ended otherwise than by a stop string."""
        if self._stream is None or self.stopped_by is not None:
            return ""
        text, self._held = self._held + self._stream.rest(), ""
        return text

    def _cut(self, text: str) -> str:
        first = len(text)
        for stop in self._stop:
            found = text.find(stop, 0, first + len(stop) - 1)  # earlier than what another has found
            if found >= 0:
                first, self.stopped_by = found, stop
        if self.stopped_by is None and text[-1] in self._inside:
            first -= max(_overlap(text, stop) for stop in self._stop)
            self._held = text[first:]
        return text[:first]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of the text that the stop string begins with."""
    for count in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:count]):
            return count
    return 0
