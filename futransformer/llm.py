"""LLM: a model folder, an engine and a tokenizer behind two calls, as users of vLLM know them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from futransformer.engine.outputs import RequestOutput
from futransformer.engine.params import SamplingParams
from futransformer.generator.precision import Precision
from futransformer.tokenizer import Message

Prompt = str | Sequence[int]


class LLM:
    """A loaded model that continues prompts and answers messages, many at a time."""

    def __init__(
        self,
        model: Path | str,
        *,
        precision: str | Precision | None = None,
        max_num_seqs: int = 64,
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 2048,
        num_pages: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Load a Hugging Face folder, or ``smollm2-135m``.

        The cache has ``num_pages`` pages of 64 tokens; by default as many as fit into ``gpu_memory_utilization`` of the
        GPU's memory beside the weights, and on the CPU room for 16,384 tokens. ``options`` are those of
        ``Llama.from_pretrained`` (kernels, device, progress, recipe, ...), the rest those of ``Engine``.
        """
        raise NotImplementedError

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt, text or token ids, by one set of parameters or one each; in the prompts' order."""
        raise NotImplementedError

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template."""
        raise NotImplementedError

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """The deltas of ``generate`` as they come; ``request_id`` is the prompt's number."""
        raise NotImplementedError

    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """The deltas of ``chat`` as they come."""
        raise NotImplementedError
