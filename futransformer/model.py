"""A Llama on one device: prefill, decode, greedy generation, on generated kernels or on the reference.

Sequences are read without padding: a pass concatenates the rows of all prompts, and a prompt longer than
``max_rows`` takes several passes. The model holds one batch of sequences at a time: ``prefill`` begins it, ``extend``
and ``decode`` continue it. T tokens in a pass, B sequences.
"""

from __future__ import annotations

import operator
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from futransformer.blocks import (
    UNGAINED,
    UNSCALED,
    BlockGains,
    DecodePass,
    Pass,
    PrefillPass,
    llama_block,
)
from futransformer.checkpoint import load_checkpoint
from futransformer.decode_step import DecodeStep
from futransformer.driver import hopper_problem, require_hopper
from futransformer.fp8_scaling import Fp8Scales, Fp8Scaling, check_mode
from futransformer.generation import Generation, OnToken
from futransformer.generator.config import LlamaConfig, load_config
from futransformer.generator.errors import CheckpointError, InputError
from futransformer.generator.kv_format import KvFormat
from futransformer.generator.precision import E4M3, Precision, get_precision
from futransformer.generator.specs import PAGE_SIZE
from futransformer.graphs import GraphPool
from futransformer.kv_cache import CachedSequence, KVCache, page_bucket, pages_for, upload
from futransformer.memory import allocation_errors, check_memory, plan_memory
from futransformer.ops.interface import Ops, Stream, WalkLayers
from futransformer.ops.validate import DTYPES
from futransformer.prefill_step import CAPTURED_ROWS, HostPass, PassInputs, PassShape, PrefillGraphs
from futransformer.quantize.description import check_sums, named_precision
from futransformer.quantize.folder import read_recipe
from futransformer.quantize.recipe import Fp8Recipe
from futransformer.reference import ReferenceOps
from futransformer.sampling import Sampling, SamplingRows
from futransformer.speculation import Speculation, check_drafts
from futransformer.weights import LlamaWeights, load_weights, serving

if TYPE_CHECKING:
    from futransformer.build.compile import BuildEvent

CACHE_TOKENS = 16384  # default size of the KV cache
TOKENS_AHEAD = 128  # that decode reserves pages for at a time: the block table changes once in so many steps
MAX_ROWS = 8192  # rows of one prefill pass: enough to fill a GPU, few enough that activations stay small


@dataclass(frozen=True)
class Chunk:
    """Tokens start .. stop - 1 of prompt ``index``, part of one prefill pass."""

    index: int
    start: int
    stop: int


class Llama:
    """A loaded model and its KV cache."""

    def __init__(
        self,
        config: LlamaConfig,
        ops: Ops,
        weights: LlamaWeights,
        cache: KVCache,
        *,
        max_rows: int = MAX_ROWS,
        scaling: Fp8Scaling | None = None,
    ) -> None:
        """Put the parts together; ``from_pretrained`` makes them from a folder. ``scaling`` is of an FP8 prefill."""
        if max_rows < 1:
            raise InputError(f"a pass takes at least one row: max_rows must not be {max_rows}")
        self.config = config
        self.ops = ops
        self.weights = weights
        self.cache = cache
        self.max_rows = max_rows
        self.scaling = scaling
        self.sequences: list[CachedSequence] = []
        self.graph_pool = GraphPool()
        self._short_passes = PrefillGraphs(self._prefill_logits, cache.device, self.graph_pool)
        self._steps: dict[tuple[int, int], DecodeStep] = {}  # by sequences and pages
        self._step: DecodeStep | None = None  # the one that holds this batch's lengths and pages; None: out of date
        self._room = 0  # decode steps until a sequence needs a page

    @classmethod
    def from_pretrained(
        cls,
        folder: Path | str,
        *,
        ops: Ops | None = None,
        precision: str | Precision | None = None,
        device: torch.device | str | None = None,
        cache_tokens: int = CACHE_TOKENS,
        max_rows: int = MAX_ROWS,
        kernels: Path | None = None,
        progress: Callable[[str], None] | None = None,
        batch_invariant: bool = False,
        fp8_scales: Fp8Scales = "frozen",
        recipe: Fp8Recipe | None = None,
        kv_scales: Tensor | None = None,
    ) -> Llama:
        """Load a Hugging Face folder: on generated kernels where there is a Hopper GPU, else on the CPU reference.

        ``ops`` overrides the choice, and ``device="cpu"`` asks for the reference; ``model.ops.describe()`` says what
        was chosen. ``kernels`` names a folder of built kernels, and so asks for a GPU; ``progress`` hears what takes
        long. A model that does not fit the device's memory is refused before its weights are read. With
        ``batch_invariant`` a sequence decodes to the same bits in any batch of 1 to 8.

        ``precision``: None is what a folder of ours names, and BF16 of any other.
        INT4 weights of decode are rounded to nearest as they are loaded, unless the checkpoint is of INT4 codes: those
        stay as they are (``precision`` must have their groups). Prefill keeps a copy of its own type. Other codes are
        dequantised, which ``progress`` hears.
        An FP8 precision takes the folder that `futransformer calibrate` wrote, or ``recipe`` in place of that
        folder's. ``fp8_scales``: they stay as calibrated, or follow what is read (futransformer.fp8_scaling).
        ``kv_scales`` are of a cache of E4M3, float32 [layers, 2] (futransformer.quantize.kv); None: a code is worth 1.
        """
        folder = Path(os.path.expanduser(folder))
        precision = get_precision(precision or named_precision(folder) or "bf16")
        config = load_config(folder)
        check_mode(fp8_scales)
        if precision.prefill == E4M3:
            if recipe is None:
                recipe = read_recipe(folder, config)
            recipe.check(config.num_hidden_layers)
        elif fp8_scales != "frozen" or recipe is not None:
            raise InputError(f"FP8 scales are of an FP8 prefill, and {precision.name} has none: leave them out")
        if kv_scales is not None and precision.kv != E4M3:
            raise InputError(f"kv_scales are of a cache of E4M3, and that of {precision.name} is none: leave them out")
        bf16 = recipe.bf16 if recipe is not None else frozenset()
        wanted = "cuda" if device is None and kernels is not None else device
        target = ops.device if ops is not None else pick_device(wanted)
        if kernels is not None and (ops is not None or target.type == "cpu"):
            raise InputError(f"kernels ({kernels}) are for a GPU: leave them out, or the request for the reference")
        reference = isinstance(ops, ReferenceOps) if ops is not None else target.type == "cpu"
        plan = plan_memory(config, precision, cache_tokens=cache_tokens, rows=max_rows, reference=reference, bf16=bf16)
        check_memory(config.name, plan, target)
        checkpoint = load_checkpoint(folder, config)
        if checkpoint.format is not None:
            check_sums(folder)
        precision, note = serving(checkpoint, precision)
        if note is not None and progress is not None:
            progress(f"{config.name}: {note}")
        if ops is None:
            ops = make_ops(
                config,
                precision,
                target,
                kernels=kernels,
                progress=progress,
                batch_invariant=batch_invariant,
                mixed=bool(bf16),
            )
        if precision.kv == E4M3 and kv_scales is None:
            kv_scales = torch.ones(config.num_hidden_layers, 2)
        kv_dtype = DTYPES[precision.kv]
        if isinstance(ops, ReferenceOps) and (kv_scales is None or ops.dtype == torch.float32):
            kv_dtype = ops.dtype
        copy = copy_of(ops, precision)
        cache = KVCache(config, pages_for(cache_tokens), device=target, dtype=kv_dtype, scales=kv_scales, copy=copy)
        with allocation_errors(f"loading {config.name}, which needs {plan}", "use a smaller model or cache"):
            weights = load_weights(checkpoint, config, ops, precision, recipe)
        scaling = None
        if recipe is not None:
            most = max(max_rows, CAPTURED_ROWS)  # short passes are padded
            scaling = Fp8Scaling(recipe.scales, weights.scales, mode=fp8_scales, bf16=bf16, max_rows=most)
        return cls(config, ops, weights, cache, max_rows=max_rows, scaling=scaling)

    # The batch of sequences

    def start(self, batch: int) -> None:
        """Begin a batch of empty sequences; the previous one's pages are free again."""
        if batch < 1:
            raise InputError("the batch is empty: give at least one prompt")
        self.cache.release(self.sequences)
        self.sequences = [CachedSequence() for _ in range(batch)]
        self._forget_device_state()

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these sequences of the batch, in this order; the others' pages are free again."""
        if len(set(rows)) < len(rows) or not all(0 <= row < len(self.sequences) for row in rows):
            raise InputError(f"keep takes different rows of a batch of {len(self.sequences)}, not {list(rows)}")
        kept = [self.sequences[row] for row in rows]
        self.cache.release(sequence for sequence in self.sequences if sequence not in kept)
        self.sequences = kept
        self._forget_device_state()

    def reserve(self, tokens: Sequence[int]) -> None:
        """Make room for this many more tokens in each sequence, or say why there is none."""
        if len(tokens) != len(self.sequences) or min(tokens, default=0) < 0:
            raise InputError(f"reserve takes a count for each of {len(self.sequences)} sequences, not {list(tokens)}")
        totals = [sequence.length + count for sequence, count in zip(self.sequences, tokens, strict=True)]
        limit = self.config.max_position_embeddings
        for index, total in enumerate(totals):
            if total > limit:
                raise InputError(
                    f"sequence {index} would have {total} tokens; {self.config.name} is made for at most {limit} "
                    "(max_position_embeddings): shorten the prompt or ask for fewer new tokens"
                )
        if self.cache.reserve(self.sequences, totals):
            self._forget_device_state()

    def _forget_device_state(self) -> None:
        self._step, self._room = None, 0

    # Prefill

    def prefill(self, prompts: Sequence[Sequence[int]], *, rows: Literal["last", "all"] = "last") -> Tensor:
        """Begin a batch; float32 logits of each prompt's last token [B, vocab_size], or of all [T, vocab_size]."""
        checked = self._check_prompts(prompts)
        self.start(len(checked))
        return self._extend(checked, rows)

    def extend(self, prompts: Sequence[Sequence[int]], *, rows: Literal["last", "all"] = "last") -> Tensor:
        """Append tokens to every sequence of the batch, many at a time; logits as ``prefill`` gives them."""
        return self._extend(self._check_prompts(prompts), rows)

    @allocation_errors("reading prompts", "read fewer or shorter ones at a time, or logits of the last rows alone")
    def _extend(self, prompts: list[list[int]], rows: Literal["last", "all"]) -> Tensor:
        if rows not in ("last", "all"):
            raise InputError(f'logits are given of the "last" rows or of "all", not of {rows!r}')
        if len(prompts) != len(self.sequences):
            raise InputError(
                f"{len(prompts)} prompts for a batch of {len(self.sequences)} sequences; begin another with prefill"
            )
        self.reserve([len(prompt) for prompt in prompts])
        logits = [
            self._prefill_chunks(prompts, chunks, rows)
            for chunks in split_into_passes([len(prompt) for prompt in prompts], self.max_rows)
        ]
        self._forget_device_state()
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _prefill_chunks(
        self, prompts: Sequence[Sequence[int]], chunks: Sequence[Chunk], rows: Literal["last", "all"]
    ) -> Tensor:
        """One pass over these chunks; logits of all their rows, or of the rows that end a prompt."""
        rows_of_pass = HostPass()
        for chunk in chunks:
            prompt = prompts[chunk.index]
            ends = chunk.stop == len(prompt)
            rows_of_pass.add(self.sequences[chunk.index], prompt[chunk.start : chunk.stop], ends=ends)
        return self.read(rows_of_pass, rows)

    @torch.inference_mode()
    def read(self, rows_of_pass: HostPass, rows: Literal["last", "all"] = "last") -> Tensor:
        """Launch one pass over rows of any sequences that hold pages of the cache, those of the batch or others.

        Float32 logits of the rows that end, [E, vocab_size], or of all.
        """
        shape, device = rows_of_pass.shape, self.cache.device
        if self.ops.capturable and rows == "last" and shape.ends and shape.rows <= CAPTURED_ROWS:
            logits = self._short_passes.run(rows_of_pass).clone()
        else:
            buffer = rows_of_pass.buffer(shape, pinned=device.type == "cuda").to(device, non_blocking=True)
            inputs = PassInputs.of(buffer, shape)
            logits = self._prefill_logits(inputs, inputs.prefill_pass(rows_of_pass.longest), rows)
        if self.scaling is not None:
            self.scaling.finish_pass(begins=0 in rows_of_pass.starts)
        return logits

    def _prefill_logits(
        self, inputs: PassInputs, rows_of_pass: PrefillPass, rows: Literal["last", "all"] = "last"
    ) -> Tensor:
        with self.ops.chain():  # opened when all that its kernels may read early is on its way
            stream = self._forward(inputs.tokens, rows_of_pass)
            # the head reads the residual, which is BF16 where x is FP8
            x, sumsq = stream.residual, stream.sumsq
            if rows == "last":
                x, sumsq, _ = self.ops.gather_rows("prefill", x, inputs.ends)
            if len(x):
                return self.ops.lm_head("prefill", x, sumsq, self.weights.lm_head["prefill"])
            return torch.empty(0, self.config.vocab_size, device=x.device)

    # Decode

    def decode(self, tokens: Tensor | Sequence[int]) -> Tensor:
        """Append one token to every sequence; float32 logits [B, vocab_size].

        Tokens on a GPU (int32 [B], as ``ops.argmax`` gives them) are taken as they are, without synchronisation; one
        outside the vocabulary gives a row of NaN.
        """
        logits = self._decode(tokens, logits=True)
        assert logits is not None
        return logits.clone()

    def decode_greedily(self, tokens: Tensor | Sequence[int]) -> Tensor:
        """Append one token to every sequence; the likeliest next of each, int32 [B], overwritten by the next step.

        Given back to the next call as it is, no token leaves the device and a step is one launch.
        """
        self._decode(tokens, logits=False)
        assert self._step is not None
        return self._step.tokens

    @torch.inference_mode()
    def _decode(self, tokens: Tensor | Sequence[int], *, logits: bool) -> Tensor | None:
        """Append one token to every sequence; logits, if asked for, that the next step overwrites."""
        if not isinstance(tokens, Tensor) or tokens.device.type == "cpu":
            tokens = upload(self.token_ids("decode", tokens), torch.int32, self.cache.device)
        elif tokens.dtype not in (torch.int32, torch.int64):
            raise InputError(f"decode takes tokens as int32 or int64, not as {tokens.dtype}")
        if not self.sequences:
            raise InputError("decode continues sequences, and there are none: begin with prefill")
        if tokens.shape != (len(self.sequences),):
            raise InputError(
                f"decode takes one token a sequence, {len(self.sequences)}; the tokens' shape is {list(tokens.shape)}"
            )
        if self._room == 0:
            self._make_room()
        step = self.ready_step()
        if tokens is not step.tokens:
            step.tokens.copy_(tokens)
        self._room -= 1
        for sequence in self.sequences:
            sequence.length += 1
        return step.run(max(sequence.length for sequence in self.sequences), logits=logits)

    def _make_room(self) -> None:
        """Reserve pages for the next tokens: for some ahead if the cache has them, else for one each."""
        limit = self.config.max_position_embeddings
        ahead = [min(sequence.length + TOKENS_AHEAD, limit) for sequence in self.sequences]
        fits = self.cache.missing_pages(self.sequences, ahead) <= self.cache.free_pages
        if fits and self.cache.reserve(self.sequences, ahead):
            self._forget_device_state()
        self.reserve([1] * len(self.sequences))
        self._room = min(min(len(s.pages) * PAGE_SIZE, limit) - s.length for s in self.sequences)

    def ready_step(self) -> DecodeStep:
        """The step of this batch's shape, with the batch's state on the device."""
        if self._step is None:
            width = page_bucket(max(len(sequence.pages) for sequence in self.sequences))
            self._step = self.decode_step(len(self.sequences), width)
            self._step.load(self.sequences, self.cache)
        return self._step

    def decode_step(self, batch: int, width: int) -> DecodeStep:
        """The step of any ``batch`` sequences of at most ``width`` pages: whoever runs it loads its state first."""
        shape = batch, width
        if shape not in self._steps:
            vocab_size, pool = self.config.vocab_size, self.graph_pool
            self._steps[shape] = DecodeStep(self.ops, self._decode_tokens, *shape, vocab_size, pool)
        return self._steps[shape]

    def warm_up_step(self, batch: int, width: int, *, logits: bool) -> None:
        """Capture the step of ``batch`` sequences of ``width`` pages before it comes."""
        self._step = None
        self.decode_step(batch, width).warm_up(logits=logits)

    def warm_up_pass(self, shape: PassShape) -> None:
        """Capture a short pass of a padded shape before it comes."""
        self._short_passes.warm_up(shape)

    @cached_property
    def _walk(self) -> WalkLayers | None:
        """All layers of a decode step as one operation, if there is one. Made by a step that runs eagerly; from then on
        weights and pages stay where they are.
        """
        return self.ops.bind_layers(self.weights.layers, self.cache)

    def _decode_tokens(
        self, tokens: Tensor, rows: DecodePass, logits: bool, sampling: SamplingRows | None = None
    ) -> Tensor | None:
        """See Forward."""
        stream, head = self._forward(tokens, rows), self.weights.lm_head["decode"]
        if sampling is not None:
            chosen_from = self.ops.lm_head("decode", stream.x, stream.sumsq, head)
            self.ops.sample(chosen_from, sampling, out=tokens)
            return chosen_from if logits else None
        return self.ops.next_tokens(stream.x, stream.sumsq, head, logits=logits, out=tokens).logits

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        eos_token_ids: Sequence[int] | None = None,
        on_token: OnToken | None = None,
        sampling: Sampling | Sequence[Sampling] | None = None,
        speculate: int = 0,
    ) -> list[list[int]]:
        """Continue each prompt; the new tokens of each, the one that ended it included.

        Greedily, or as ``sampling`` says for all prompts or for each. A sequence ends at any of ``eos_token_ids``
        (default: the model's; an empty list never ends). ``on_token(index, token)`` hears every token, on a GPU some
        steps after it is chosen (futransformer.generation). Room for all new tokens is reserved first, so a request
        that the cache cannot finish is refused before it starts.

        ``speculate`` up to so many tokens ahead (1 to 7), one prompt after the other: what followed the last few tokens
        before is tried again, several tokens in a step (futransformer.speculation). The texts are the same where rows
        do not depend on their batch (``batch_invariant``).
        """
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        checked = self._check_prompts(prompts)
        ends = frozenset(
            self.config.eos_token_ids if eos_token_ids is None else self.token_ids("eos_token_ids", eos_token_ids)
        )
        if isinstance(sampling, Sampling):
            sampling = [sampling] * len(checked)
        if sampling is not None and len(sampling) != len(checked):
            raise InputError(
                f"{len(sampling)} settings of sampling for {len(checked)} prompts: give one for each, or one"
            )
        if sampling is not None and all(each.greedy for each in sampling):
            sampling = None
        if speculate:
            settings = [None] * len(checked) if sampling is None else sampling
            return self._speculate(checked, max_new_tokens, ends, on_token, settings, speculate)
        self.start(len(checked))
        try:
            # the last new token is never read, so it needs no slot
            self.reserve([len(prompt) + max_new_tokens - 1 for prompt in checked])
            logits = self._extend(checked, "last")
            check_numbers(self.config.name, logits)
            return Generation(self, checked, max_new_tokens, sorted(ends), sampling, on_token).run(logits)
        finally:
            self.keep([])

    def _speculate(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        ends: frozenset[int],
        on_token: OnToken | None,
        settings: Sequence[Sampling | None],
        drafts: int,
    ) -> list[list[int]]:
        """Generate one prompt after the other; all are checked before the first is read."""
        check_drafts(drafts, settings)
        texts = []
        try:
            for read in (False, True):
                for index, (prompt, sampling) in enumerate(zip(prompts, settings, strict=True)):
                    self.start(1)
                    self.reserve([len(prompt) + max_new_tokens - 1])
                    if not read:
                        continue
                    logits = self._extend([prompt], "last")
                    check_numbers(self.config.name, logits)
                    each = Speculation(self, prompt, drafts, sampling)
                    texts.append(each.run(logits, max_new_tokens, ends, partial(on_token, index) if on_token else None))
            return texts
        finally:
            self.keep([])

    # Shared

    def _forward(self, tokens: Tensor, rows: Pass) -> Stream:
        """Embed and run all blocks: the stream before the final norm."""
        scaling = self.scaling if rows.phase == "prefill" else None
        first = None if scaling is None else scaling.embedding
        gains = self.weights.gains if rows.phase == "decode" else ()
        gain = gains[0] if gains else None
        stream = self.ops.gather_rows(rows.phase, self.weights.embedding, tokens, fp8=first, gain=gain)
        if (
            isinstance(rows, DecodePass)
            and self._walk is not None
            and self._walk.serves(len(tokens), rows.max_seqlen_k)
        ):
            return self._walk(stream, rows, self.weights.rope_table)
        for index, layer in enumerate(self.weights.layers):
            k_pages, v_pages = self.cache.layer(index)
            scales = UNSCALED if scaling is None else scaling.blocks[index]
            stream = llama_block(
                self.ops,
                layer,
                stream,
                rows,
                self.weights.rope_table,
                k_pages,
                v_pages,
                scales,
                self.cache.scale(index),
                BlockGains(*gains[2 * index + 1 : 2 * index + 3]) if gains else UNGAINED,
                self.cache.copy_layer(index),
            )
        return stream

    def _check_prompts(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the prompts as lists of token ids, whatever kind of sequence they came as."""
        try:
            listed = list(prompts)
        except TypeError:
            raise InputError(f"prompts are lists of token ids, one a sequence, not {prompts!r}") from None
        if not listed:
            raise InputError("the batch is empty: give at least one prompt")
        checked = [self.token_ids(f"prompt {index}", prompt) for index, prompt in enumerate(listed)]
        if [] in checked:
            raise InputError(
                f"prompt {checked.index([])} is empty: give at least one token (the model's BOS, for example)"
            )
        return checked

    def token_ids(self, where: str, tokens: Tensor | Iterable[int]) -> list[int]:
        """Return integers within the vocabulary; a float is refused, not rounded."""
        values = tokens.tolist() if hasattr(tokens, "tolist") else tokens  # of a tensor or an array
        try:
            ids = [operator.index(value) for value in values]
        except TypeError:
            shown = reprlib.repr(values)
            raise InputError(
                f"{where}: {shown} is not a list of token ids, as futransformer.tokenizer.Tokenizer makes"
            ) from None
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < self.config.vocab_size:
                raise InputError(
                    f"{where}: token {token} is outside the vocabulary of {self.config.vocab_size}; "
                    "was it made by another model's tokenizer?"
                )
        return ids


def check_numbers(name: str, logits: Tensor) -> None:
    """Refuse to go on from logits that are not numbers: what was chosen by them would look like an answer."""
    if logits.isnan().any():
        raise not_a_number(name)


def not_a_number(name: str) -> CheckpointError:
    """What to say of a model that gives such logits."""
    return CheckpointError(
        f"{name} gives logits that are not numbers: its weights hold NaN or infinities, or its activations leave "
        "the range of BF16; fetch the checkpoint again, and compare with another implementation"
    )


def pick_device(device: torch.device | str | None) -> torch.device:
    """The device asked for, "cpu" or the current GPU; by default the GPU if kernels run on it, else the CPU."""
    if device is None:
        return require_hopper() if hopper_problem() is None else torch.device("cpu")
    try:
        asked = torch.device(device)
    except RuntimeError:
        raise InputError(f"there is no device {device!r}: give cpu or cuda") from None
    if asked.type not in ("cpu", "cuda"):
        raise InputError(f"the model runs on cpu or cuda, not on {device}")
    if asked.type == "cpu":
        return torch.device("cpu")
    current = require_hopper()
    if asked.index not in (None, current.index):
        raise InputError(
            f"kernels run on the current GPU, {current}, not on {asked}: call torch.cuda.set_device({asked.index})"
        )
    return current


def make_ops(
    config: LlamaConfig,
    precision: Precision,
    device: torch.device,
    *,
    kernels: Path | None = None,
    progress: Callable[[str], None] | None = None,
    batch_invariant: bool = False,
    mixed: bool = False,
) -> Ops:
    """Generated kernels on a GPU, the reference on the CPU; options as in ``load_kernels``."""
    if device.type == "cpu":
        return ReferenceOps(config, copy=precision.copy)
    from futransformer.library import load_kernels  # noqa: PLC0415 - the reference needs neither driver nor kernels

    def compiled(event: BuildEvent) -> None:
        if progress is not None and not event.cached:
            progress(f"compiled kernel {event.done} of {event.total}: {event.record.name}")

    return load_kernels(
        config, precision, folder=kernels, progress=compiled, batch_invariant=batch_invariant, mixed=mixed
    )


def copy_of(ops: Ops, precision: Precision) -> KvFormat | None:
    """The form of the cache's INT4 copy; a reference that rounds nothing may have none."""
    if not isinstance(ops, ReferenceOps) or ops.copy == precision.copy:
        return precision.copy
    if ops.copy is None and ops.dtype == torch.float32:
        return None
    raise InputError(f"the reference has a copy of {ops.copy}, and {precision.name} one of {precision.copy}")


def split_into_passes(lengths: Sequence[int], max_rows: int) -> Iterator[list[Chunk]]:
    """Cut prompts of these lengths, in order, into passes of at most ``max_rows`` rows."""
    chunks: list[Chunk] = []
    free = max_rows
    for index, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + free)
            chunks.append(Chunk(index, start, stop))
            free -= stop - start
            start = stop
            if free == 0:
                yield chunks
                chunks, free = [], max_rows
    if chunks:
        yield chunks
