"""Operations that keep memory from launch to launch, when the stream changes."""

from __future__ import annotations

import torch


class StreamOrder:
    """Lets the launches of one operation follow each other, whatever stream each is on; not replays of graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def follow(self) -> None:
        """Before a launch: where the stream is another than the last launch's, it waits for that one."""
        if self._device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream
