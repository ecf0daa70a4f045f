"""One text of a request, from its prompt to its end: what the scheduler and the engine know about it."""

from __future__ import annotations

from futransformer.engine.outputs import RequestMetrics, RequestOutput
from futransformer.engine.pages import ROOT, page_key
from futransformer.engine.params import SamplingParams
from futransformer.engine.text import TextBuilder
from futransformer.generator.specs import PAGE_SIZE
from futransformer.kv_cache import CachedSequence


class Request:
    """What the texts of a request have in common."""

    __slots__ = (
        "metrics",
        "params",
        "prompt",
        "prompt_token_ids",
        "request_id",
        "sequences",
        "siblings_queued",
        "unfinished",
    )

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        metrics: RequestMetrics,
    ) -> None:
        """Begin without texts."""
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.metrics = metrics
        self.sequences: list[EngineSequence] = []
        self.siblings_queued = False  # the texts behind the first
        self.unfinished = params.n

    def output(self) -> RequestOutput:
        """A delta of nothing yet."""
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, [], False, self.metrics)


class EngineSequence:
    """A text's tokens, its pages, and how far its computation has been launched."""

    __slots__ = (
        "cached",
        "ends",
        "finished",
        "in_flight",
        "index",
        "keys",
        "least",
        "most",
        "order",
        "plain",
        "prompt_length",
        "request",
        "seed",
        "shared",
        "slot",
        "target",
        "text",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        order: tuple[int, int],
        *,
        most: int,
        ends: frozenset[int],
        seed: int,
        text: TextBuilder,
    ) -> None:
        """Text ``index`` of the request; ``most`` tokens in all, prompt included; any of ``ends`` ends it."""
        self.request = request
        self.index = index
        self.order = order  # by arrival
        self.most = most
        self.ends = ends
        self.seed = seed
        self.text = text
        params = request.params  # plain: the likeliest token is taken and nothing else is asked for
        self.plain = params.greedy and params.repetition_penalty == 1 and params.logprobs is None
        self.plain &= params.min_tokens == 0
        self.least = params.min_tokens
        self.prompt_length = len(request.prompt_token_ids)
        self.tokens = list(request.prompt_token_ids)  # those that are known on the host
        self.cached = CachedSequence()  # length: tokens whose K and V are written, or will be by what is launched
        self.target = 0  # tokens that prefill reads: all that were known when the sequence got its pages
        self.in_flight = 0  # tokens that are being computed
        self.slot = -1  # its place in the runner; -1: none, it waits
        self.finished = False
        self.keys: list[bytes] = []  # of the complete pages of its tokens
        self.shared = 0  # pages that others may find, the first so many

    @property
    def generated(self) -> int:
        """New tokens that are known."""
        return len(self.tokens) - self.prompt_length

    @property
    def prefilling(self) -> bool:
        """Whether prompt, or what is read again, is left to be launched."""
        return self.cached.length < self.target

    def page_keys(self, count: int) -> list[bytes]:
        """Keys of the first ``count`` pages, which are complete."""
        while len(self.keys) < count:
            begin = len(self.keys) * PAGE_SIZE
            before = self.keys[-1] if self.keys else ROOT
            self.keys.append(page_key(before, self.tokens[begin : begin + PAGE_SIZE]))
        return self.keys[:count]
