"""Train a small Llama with the head geometry of Llama-3.1-8B from a text, in minutes on one GPU.

    python examples/train_tiny_llama.py BOOKS --prepare -o tokens     # BOOKS: .txt or .txt.xz; needs no GPU
    python examples/train_tiny_llama.py tokens -o tiny-llama --seconds 240
    python examples/train_tiny_llama.py BOOKS -o tiny-llama           # both at once

Hidden size 512, 6 layers, 4 heads of 128 on one KV head, MLP 1792, a tied vocabulary of 8192: 24.6 million parameters.
It writes a Hugging Face folder: BF16 safetensors in shards of at most 15 MB, config.json, a byte-level BPE tokenizer.
Lines that begin with "# Title: " begin a new book; between two stands an end-of-text token.

Weights and AdamW are float32, products BF16 (autocast). The learning rate follows the share of the time that has
passed, so training ends as well in any time; the same seed gives the same windows in the same order, not the same bits.
With --steps it follows the steps instead. One H200 reads 1.5 million tokens a second; of a text of 28 million the
held-out loss was least after six passes, and 1.5 % higher after ten.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save as to_bytes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F

from futransformer.bench.results import weights_sha256
from futransformer.generator.errors import FuTransformerError, InputError

HIDDEN, LAYERS, HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY = 512, 6, 4, 128, 1792, 8192
ROPE_THETA, EPS, MAX_POSITIONS = 500000.0, 1e-5, 8192
END_OF_TEXT = "<|endoftext|>"
BOOK = "\n# Title: "  # how a book begins, in a file of several
PIECE = 1 << 20  # characters that are tokenised at a time: the tokenizer keeps some 100 bytes a token
BPE_TEXT = 20_000_000  # characters of the text, evenly spread, that the vocabulary is found on
SHARD = 14_900_000  # bytes of tensors: a shard stays below 15 MB with its header
WARM_UP, LAST_RATE = 0.03, 0.05  # of the time, and of the peak rate
ENDING = 5.0  # seconds for the last held-out loss and for writing
HELD_OUT_WINDOWS = 64  # that the loss is reported on, while training; at the end all of them
PREPARED = "tokens.npz.xz"
Tokens = npt.NDArray[np.uint16]


class Attention(nn.Module):
    """Causal attention, all heads on one KV head; half-split RoPE. Names are those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """X, and what it returns: [batch, T, hidden]; cos and sin: [T, head_dim]."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, HEADS, HEAD_DIM).transpose(1, 2)
        k, v = (linear(x)[:, None] for linear in (self.k_proj, self.v_proj))
        q, k = (rotate(part, cos, sin).to(v.dtype) for part in (q, k))
        k, v = (part.repeat(1, HEADS, 1, 1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """X, and what it returns: [..., hidden]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One layer; the residual stream is float32."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.mlp = Mlp()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """X, and what it returns: float32 [batch, T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """Tokens [batch, T + 1] -> the mean negative log-likelihood of the last T of each row."""

    def __init__(self, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(HIDDEN, eps=EPS)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:  # what a layer adds begins small, so that the residual stream does not grow with depth
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if last else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2, device=tokens.device) / HEAD_DIM)
        angles = torch.arange(inputs.shape[1], device=tokens.device)[:, None] * frequencies.repeat(2)
        x = self.embed_tokens(inputs)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        logits = F.linear(self.norm(x), self.embed_tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of [..., T, head_dim], whose pairs are (i, i + head_dim / 2)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def read_text(path: Path) -> str:
    """The text of a .txt or .txt.xz file."""
    try:
        content = path.read_bytes()
        return (lzma.decompress(content) if path.suffix == ".xz" else content).decode()
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}; name a UTF-8 text, .txt or .txt.xz") from error


def train_tokenizer(text: str, vocabulary: int) -> Tokenizer:
    """A byte-level BPE, found on lines that are spread evenly over the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = text.splitlines(keepends=True)
    tokenizer.train_from_iterator(lines[:: max(1, len(text) // BPE_TEXT)], trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise InputError(f"the text gives a vocabulary of {tokenizer.get_vocab_size()}, not {vocabulary}: use a longer")
    return tokenizer


def tokenise(tokenizer: Tokenizer, text: str) -> Tokens:
    """Every book's tokens, each followed by the end-of-text token."""
    end, parts = tokenizer.token_to_id(END_OF_TEXT), []
    for index, book in enumerate(text.split(BOOK)):
        whole = book if index == 0 else BOOK[1:] + book
        start = 0
        while start < len(whole):
            stop = whole.find("\n", start + PIECE) + 1 or len(whole)
            parts.append(np.array(tokenizer.encode(whole[start:stop]).ids, dtype=np.uint16))
            start = stop
        parts.append(np.array([end], dtype=np.uint16))
    return np.concatenate(parts)


def prepare(args: argparse.Namespace) -> tuple[Tokenizer, Tokens, Tokens]:
    """Tokenizer, tokens of the text, tokens of the held-out text (of none: empty)."""
    if args.text.is_dir():
        stored = np.load(io.BytesIO(lzma.decompress((args.text / PREPARED).read_bytes())))
        return Tokenizer.from_file(str(args.text / "tokenizer.json")), stored["train"], stored["held_out"]
    text = read_text(args.text)
    known = args.tokenizer and args.tokenizer / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(known)) if known else train_tokenizer(text, args.vocabulary)
    held_out = tokenise(tokenizer, read_text(args.held_out)) if args.held_out else np.empty(0, np.uint16)
    return tokenizer, tokenise(tokenizer, text), held_out


def batches(tokens: Tensor, length: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Windows of ``length`` tokens, [batch, length], without end: every pass cuts and orders them anew."""
    count = (len(tokens) - 1) // length - 1
    if count < batch:
        raise InputError(f"{len(tokens)} tokens hold no batch of {batch} windows of {length}: give a longer text")
    while True:
        first = int(torch.randint(length, (1,), generator=generator))
        order = torch.randperm(count, generator=generator)[: count - count % batch].view(-1, batch)
        for chosen in order:
            starts = first + chosen.to(tokens.device) * length
            yield tokens[starts[:, None] + torch.arange(length, device=tokens.device)].long()


def rate(progress: float) -> float:
    """Share of the peak learning rate after this share of the training: warm-up, then a cosine."""
    if progress < WARM_UP:
        return max(progress, 1e-3) / WARM_UP
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * min(1.0, (progress - WARM_UP) / (1 - WARM_UP)))) / 2


@torch.no_grad()
def held_out_loss(loss_of: Any, tokens: Tensor, length: int, batch: int, *, windows: int, until: float = 0) -> float:
    """Mean loss over windows that do not overlap, in full batches, the first one also after ``until``; else NaN."""
    count = min(len(tokens) // length, windows) // batch
    losses: list[float] = []
    for rows in tokens[: count * batch * length].view(count, batch, length):
        losses.append(loss_of(rows.long()).item())
        if until and time.perf_counter() > until:
            break
    return sum(losses) / len(losses) if losses else math.nan


def train(args: argparse.Namespace, tokens: Tokens, held_out: Tokens, vocabulary: int, began: float) -> Llama:
    """Train until the time is over, or the steps are done."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    model = Llama(args.layers, vocabulary).to(device)
    parameters = list(model.parameters())
    decayed = [[weight for weight in parameters if (weight.ndim == 2) is matrix] for matrix in (True, False)]
    groups = [{"params": decayed[0], "weight_decay": args.weight_decay}, {"params": decayed[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    forward = torch.compile(model) if device.type == "cuda" else model

    def loss_of(window: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss: Tensor = forward(window)
        return loss

    length = args.context + 1
    text, held = (torch.from_numpy(part.astype(np.int32)).to(device) for part in (tokens, held_out))
    windows = batches(text, length, args.batch, torch.Generator().manual_seed(args.seed))
    # Both compile, which takes no time of the schedule's.
    torch.autograd.backward(loss_of(text[: args.batch * length].view(-1, length).long()))
    optimizer.zero_grad()
    held_out_loss(loss_of, held, length, args.batch, windows=args.batch)
    start, step, progress = time.perf_counter(), 0, 0.0
    told, seconds = start, max(began + args.seconds - ENDING - start, 1e-9)  # one step where compiling took all of it
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate(progress)
        loss = loss_of(next(windows))
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value, step, now = loss.item(), step + 1, time.perf_counter()  # waits for the device, so that the time is true
        progress = step / args.steps if args.steps else (now - start) / seconds
        if now - told > args.every or progress >= 1:
            told, seen = now, step * args.batch * args.context
            part = held_out_loss(loss_of, held, length, args.batch, windows=HELD_OUT_WINDOWS)
            say(
                f"step {step}, {now - began:.0f} s, {seen / 1e6:.1f} M tokens ({seen / (now - start) / 1e6:.2f} M/s, "
                f"{seen / len(tokens):.2f} times the text): loss {value:.4f}, held out {part:.4f}"
            )
    whole = held_out_loss(loss_of, held, length, args.batch, windows=len(held), until=time.perf_counter() + ENDING / 2)
    say(f"{step} steps; held out, in windows of {length}: loss {whole:.5f}, perplexity {math.exp(whole):.3f}")
    return model


def save(folder: Path, model: Llama, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Write the Hugging Face folder, and say the sha256 of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.safetensors"):
        stale.unlink()
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, weight in model.state_dict().items():
        tensor = weight.detach().to("cpu", torch.bfloat16).contiguous()
        if size + tensor.nbytes > SHARD and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][f"model.{name}"] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    places: dict[str, str] = {}
    for index, shard in enumerate(shards):
        name = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        (folder / name).write_bytes(to_bytes(shard, {"format": "pt"}))  # save_file would let nobody else read it
        places |= dict.fromkeys(shard, name)
    end = tokenizer.token_to_id(END_OF_TEXT)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": args.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "vocab_size": len(model.embed_tokens.weight),
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})
    write_json(folder / "config.json", config)
    save_tokenizer(folder, tokenizer)
    say(f"{folder}: {total / 1e6:.1f} MB in {len(shards)} shards, sha256 of the weights {weights_sha256(folder)}")


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write the tokenizer's two files."""
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_tokens(folder: Path, tokens: Tokens, held_out: Tokens) -> None:
    """Write what ``prepare`` reads from a folder beside the tokenizer."""
    content = io.BytesIO()
    np.savez(content, train=tokens, held_out=held_out)
    (folder / PREPARED).write_bytes(lzma.compress(content.getvalue()))


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="Train a small Llama from a text.")
    parser.add_argument("text", type=Path, help="a UTF-8 text, .txt or .txt.xz, or a folder that --prepare wrote")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the folder to write")
    parser.add_argument("--prepare", action="store_true", help="write the tokenizer and the tokens, and train nothing")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="take this folder's tokenizer")
    parser.add_argument("--held-out", type=Path, metavar="FILE", help="a text whose loss is told while training")
    parser.add_argument("--seconds", type=float, default=240, help="wall time, from start to end (default: 240)")
    parser.add_argument("--steps", type=int, metavar="N", help="train N steps instead, in whatever time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--context", type=int, default=2048, metavar="N", help="tokens in a window (default: 2048)")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="windows in a step (default: 64)")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (default: 0.002)")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="of matrices (default: 0.1)")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"(default: {LAYERS})")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help=f"(default: {VOCABULARY})")
    parser.add_argument(
        "--every", type=float, default=15, metavar="S", help="tell the loss every S seconds (default: 15)"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Prepare, train, write."""
    began, args = time.perf_counter(), parse(argv)
    try:
        tokenizer, tokens, held_out = prepare(args)
        say(f"{len(tokens):,} tokens of a vocabulary of {tokenizer.get_vocab_size()}, {len(held_out):,} held out")
        if args.prepare:
            args.output.mkdir(parents=True, exist_ok=True)
            save_tokenizer(args.output, tokenizer)
            write_tokens(args.output, tokens, held_out)
        else:
            save(args.output, train(args, tokens, held_out, tokenizer.get_vocab_size(), began), tokenizer, args)
    except (FuTransformerError, OSError) as error:
        print(f"train_tiny_llama: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
