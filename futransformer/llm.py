"""LLM: a model folder, an engine and a tokenizer behind a few calls, as users of vLLM know them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from futransformer.engine.core import Engine
from futransformer.engine.outputs import RequestOutput
from futransformer.engine.params import SamplingParams
from futransformer.generator.config import load_config
from futransformer.generator.errors import InputError
from futransformer.generator.precision import BF16, E4M3, Precision, get_precision
from futransformer.generator.specs import PAGE_SIZE
from futransformer.memory import pages_that_fit
from futransformer.model import CACHE_TOKENS, MAX_ROWS, Llama, pick_device
from futransformer.quantize.description import named_precision
from futransformer.quantize.folder import read_recipe
from futransformer.tokenizer import Message, Tokenizer

Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams]


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
        warm_up_seconds: float = 0,
        **options: Any,
    ) -> None:
        """Load a Hugging Face folder: on generated kernels where there is a Hopper GPU, else on the CPU reference; by
        default in the precision that a folder of ours names, else in BF16.

        The cache has ``num_pages`` pages of 64 tokens; by default as many as fit into ``gpu_memory_utilization`` of the
        GPU's memory beside the weights, and on the CPU room for 16,384 tokens. On a GPU ``warm_up_seconds`` go into
        graphs that the first requests would otherwise capture. ``options`` are those of
        ``Llama.from_pretrained`` (kernels, device, progress, recipe, batch_invariant, ...), the others those of
        ``Engine``.
        """
        folder = Path(os.path.expanduser(model))
        self.tokenizer = Tokenizer(folder)
        precision = precision or named_precision(folder) or BF16.name
        if num_pages is None:
            num_pages = _pages(folder, get_precision(precision), gpu_memory_utilization, options)
        llama = Llama.from_pretrained(folder, precision=precision, cache_tokens=num_pages * PAGE_SIZE, **options)
        self.engine = Engine(
            llama,
            self.tokenizer,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            seed=seed,
        )
        if warm_up_seconds > 0:
            self.engine.warm_up(warm_up_seconds, options.get("progress"))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params | None = None
    ) -> list[RequestOutput]:
        """Continue each prompt, text or token ids, by one set of parameters or one each; in the prompts' order.

        InputError, before anything is computed, if a prompt or its parameters cannot be served.
        """
        return _whole(self.stream(prompts, sampling_params))

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], sampling_params: Params | None = None
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template."""
        return _whole(self.stream_chat(messages, sampling_params))

    def stream(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params | None = None) -> Stream:
        """The deltas of ``generate`` as they come; ``request_id`` is the prompt's number."""
        each = _prompts(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params] * len(each)
        else:
            params = list(sampling_params)
        if len(params) != len(each):
            raise InputError(f"{len(params)} sampling parameters for {len(each)} prompts: give one, or one each")
        if self.engine.has_unfinished():
            raise InputError("another stream of this LLM is open: read it to its end, or close it")
        stream = Stream(self.engine, len(each))
        try:
            for index, (prompt, of_prompt) in enumerate(zip(each, params, strict=True)):
                self._add(index, prompt, of_prompt)
        except BaseException:
            stream.close()
            raise
        return stream

    def stream_chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], sampling_params: Params | None = None
    ) -> Stream:
        """The deltas of ``chat`` as they come."""
        conversations: Any = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        return self.stream([self.tokenizer.encode_messages(each) for each in conversations], sampling_params)

    def _add(self, index: int, prompt: Prompt, params: SamplingParams | None) -> None:
        try:
            self.engine.add_request(str(index), prompt, params)
        except InputError as error:
            raise InputError(f"prompt {index}: {error}") from error


class Stream(Iterator[RequestOutput]):
    """Deltas as they come. Closed early, left by ``with``, or forgotten, it gives its requests up."""

    def __init__(self, engine: Engine, count: int) -> None:
        """Of requests 0 .. count - 1."""
        self._engine = engine
        self._count = count
        self._ready: deque[RequestOutput] = deque()
        self._open = True

    def __next__(self) -> RequestOutput:
        """Step until there is a delta. What a request failed by is raised, and ends the others."""
        while self._open and not self._ready:
            if not self._engine.has_unfinished():
                self._open = False
            else:
                self._ready += self._engine.step()
        if not self._ready:
            raise StopIteration
        delta = self._ready.popleft()
        if delta.error is not None:
            self.close()
            raise delta.error
        return delta

    def close(self) -> None:
        """Give up what is not finished; there are no more deltas."""
        if self._open:
            self._open = False
            for index in range(self._count):
                self._engine.abort(str(index))
        self._ready.clear()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several."""
    if isinstance(prompts, str):
        return [prompts]
    if not hasattr(prompts, "__iter__") or isinstance(prompts, bytes | bytearray | Mapping):
        raise InputError(f"prompts are a text, token ids, or a list of them, not a {type(prompts).__name__}")
    each: list[Any] = list(prompts)
    if not each:
        raise InputError("the batch is empty: give at least one prompt")
    if hasattr(each[0], "__index__"):
        return [each]
    return each


def _pages(folder: Path, precision: Precision, utilization: float, options: dict[str, Any]) -> int:
    """Pages that the cache has if nobody says how many."""
    if not 0 < utilization <= 1:
        raise InputError(f"gpu_memory_utilization is above 0, at most 1, not {utilization}")
    ops, kernels = options.get("ops"), options.get("kernels")
    wanted = options.get("device")
    device = ops.device if ops is not None else pick_device("cuda" if wanted is None and kernels else wanted)
    if device.type != "cuda":
        return CACHE_TOKENS // PAGE_SIZE
    config, recipe = load_config(folder), options.get("recipe")
    if recipe is None and precision.prefill == E4M3:
        recipe = read_recipe(folder, config)
    return pages_that_fit(
        config,
        precision,
        rows=options.get("max_rows", MAX_ROWS),
        bf16=frozenset() if recipe is None else recipe.bf16,
        memory=torch.cuda.mem_get_info(device),
        utilization=utilization,
    )


def _whole(deltas: Iterator[RequestOutput]) -> list[RequestOutput]:
    """Put deltas together, in the order of the prompts."""
    whole: dict[str, RequestOutput] = {}
    for delta in deltas:
        if delta.request_id in whole:
            whole[delta.request_id].add(delta)
        else:
            whole[delta.request_id] = delta
    return [whole[name] for name in sorted(whole, key=int)]
