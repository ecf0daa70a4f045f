"""Our folders in transformers: ``AutoModelForCausalLM.from_pretrained(folder)`` gives a model on our own ``Llama``.

``register()`` puts a class of ours in transformers' place for Llama configurations. Of a folder that names a precision
of ours it makes a ``FuTransformerForCausalLM``; everything else goes on to transformers as it came. A quantiser of
transformers would be the wrong hook: it replaces modules inside transformers' own blocks and cache, of which nothing is
left here. And our folders say ``compressed-tensors``, so that other engines read them: that name is taken.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from futransformer.generator.errors import InputError
from futransformer.model import Llama, check_numbers
from futransformer.quantize.description import named_precision

OURS = ("cache_tokens", "max_rows", "precision", "kernels", "batch_invariant", "fp8_scales")
# What an AutoModel passes on that means nothing to a folder on this machine.
PASSED_ON = (
    *("trust_remote_code", "adapter_kwargs", "cache_dir", "force_download", "local_files_only", "proxies", "revision"),
    *("code_revision", "subfolder", "token", "_from_auto", "_commit_hash", "low_cpu_mem_usage", "use_safetensors"),
)


def register() -> None:
    """From now on AutoModelForCausalLM loads a Llama folder that names a precision of ours on our kernels."""
    AutoModelForCausalLM.register(LlamaConfig, FuTransformerForCausalLM, exist_ok=True)


class FuTransformerForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A ``Llama`` behind transformers' interface, for ``generate`` and for logits.

    It holds no parameters that transformers knows of: nothing can be moved, trained, saved or adapted.
    """

    config_class = LlamaConfig
    main_input_name = "input_ids"

    def __init__(self, config: LlamaConfig, llama: Llama) -> None:
        super().__init__(config)
        self.llama = llama
        self._read: tuple[Tensor, Tensor] | None = None  # ids and mask [B, T] of what the cache holds
        self._batch = llama.sequences  # the list in which it does

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, *args: Any, **options: Any) -> Any:
        """Load a folder of ours; any other as transformers' LlamaForCausalLM, with the same arguments.

        ``device_map`` is a device (None, "auto": as Llama.from_pretrained chooses), ``dtype`` none but BF16; further
        options are those of Llama.from_pretrained in ``OURS``. Raises InputError for what has no meaning here, and
        what Llama.from_pretrained raises.
        """
        folder = Path(pretrained_model_name_or_path).expanduser()
        if named_precision(folder) is None:
            return LlamaForCausalLM.from_pretrained(pretrained_model_name_or_path, *args, **options)
        taken = {name: options.pop(name) for name in OURS if name in options}
        config = options.pop("config", None) or LlamaConfig.from_pretrained(folder)
        device = _device(options.pop("device_map", None))
        dtypes = [options.pop(name, None) for name in ("dtype", "torch_dtype")]
        for dtype in dtypes:
            if dtype not in (None, "auto", "bfloat16", torch.bfloat16):
                raise InputError(f"{folder}: dtype is BF16 beside what is quantised, not {dtype}: leave it out")
        unknown = [name for name, value in options.items() if name not in PASSED_ON and value is not None]
        if unknown or args:
            raise InputError(
                f"{folder}: {', '.join(unknown) or 'a further argument'} means nothing to a model of ours: leave it "
                f"out; options are device_map and {', '.join(OURS)}"
            )
        model = cls(config, Llama.from_pretrained(folder, device=device, **taken))
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        return model.eval()

    @property
    def device(self) -> torch.device:
        """Where the kernels run, and so where logits are."""
        return self.llama.cache.device

    @property
    def dtype(self) -> torch.dtype:
        """Of what passes between operations; logits are float32."""
        return torch.bfloat16

    def save_pretrained(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: the weights are packed for kernels."""
        raise InputError(f"{self.llama.config.name}: packed weights are not saved; copy the folder they came from")

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        *_: Any,
        attention_mask: Tensor | None = None,
        logits_to_keep: int = 1,
        inputs_embeds: Tensor | None = None,
        **__: Any,
    ) -> dict[str, Any]:
        """All tokens so far: ``forward`` finds by itself which of them the cache holds, and no other cache is used."""
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "logits_to_keep": logits_to_keep,
            "inputs_embeds": inputs_embeds,
        }

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        logits_to_keep: int = 0,
        **others: Any,
    ) -> Any:
        """Float32 logits [B, T, vocab_size] of whole sequences, or of their last ``logits_to_keep`` columns.

        ``input_ids`` [B, T] has every token from the beginning; where ``attention_mask`` is 0 there is none, and logits
        are 0. The columns of the call before and one more, of which the last logits are asked for, are a decode step;
        all else is a prefill of everything.
        """
        given = [name for name, value in others.items() if name not in ("return_dict", "use_cache") and _means(value)]
        if input_ids is None or given:
            raise InputError(
                f"{self.llama.config.name}: forward takes input_ids (all of them), attention_mask and logits_to_keep"
                + (f", not {', '.join(given)}" if given else "")
            )
        ids = input_ids.to(self.device)
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask.to(self.device)
        mask = mask != 0
        if mask.shape != ids.shape:
            raise InputError(
                f"{self.llama.config.name}: attention_mask must have the shape of input_ids, {list(ids.shape)}, not "
                f"{list(mask.shape)}"
            )
        if logits_to_keep != 1:
            logits = self._all_logits(ids, mask)[:, -logits_to_keep:]
        elif not mask[:, -1].all():
            raise InputError(f"{self.llama.config.name}: pad on the left: a sequence must end in the last column")
        elif self._follows(ids, mask):
            logits = self.llama.decode(ids[:, -1])[:, None]
        else:
            logits = self._logits_of(ids, mask, "last")[:, None]
        self._read, self._batch = (ids.clone(), mask.clone()), self.llama.sequences
        return CausalLMOutputWithPast(logits=logits)

    def _follows(self, ids: Tensor, mask: Tensor) -> bool:
        """Whether the cache holds all of this but its last column."""
        if self._read is None or self._batch is not self.llama.sequences:
            return False
        was_ids, was_mask = self._read
        if not (torch.equal(ids[:, :-1], was_ids) and torch.equal(mask[:, :-1], was_mask)):
            return False
        return [sequence.length for sequence in self._batch] == was_mask.sum(1).tolist()

    def _logits_of(self, ids: Tensor, mask: Tensor, rows: Literal["last", "all"]) -> Tensor:
        prompts = [row[there].tolist() for row, there in zip(ids.cpu(), mask.cpu(), strict=True)]
        logits = self.llama.prefill(prompts, rows=rows)
        check_numbers(self.llama.config.name, logits)
        return logits

    def _all_logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        rows = self._logits_of(ids, mask, "all")
        logits = rows.new_zeros(*ids.shape, rows.shape[1])
        logits[mask] = rows
        return logits


def _means(value: Any) -> bool:
    return value is not None and value is not False


def _device(device_map: Any) -> torch.device | str | None:
    """The one device that a map names."""
    if isinstance(device_map, dict) and len(device_map) == 1:
        device_map = next(iter(device_map.values()))
    if isinstance(device_map, int):
        return torch.device("cuda", device_map)
    if device_map is None or device_map == "auto":
        return None
    if not isinstance(device_map, (str, torch.device)):
        raise InputError(f"a model of ours is on one device: device_map must name it, not {device_map!r}")
    return device_map
