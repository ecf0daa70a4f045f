"""What number formats cost a model on your own text: perplexity, KL divergence and agreement beside BF16.

    python examples/compare_precisions.py ~/models/Llama-3.2-1B-Instruct mine.txt int4 int4-g32-asym bf16-kv4

Weights are rounded to nearest while loading (`futransformer quantize` has better ways). Two models are in memory at a
time. Every token goes through decode, where these formats are: minutes on a GPU, hours of a large model on a CPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from futransformer import Llama
from futransformer.comparison import compare
from futransformer.generator.errors import FuTransformerError
from futransformer.generator.specs import PAGE_SIZE
from futransformer.kv_cache import pages_for
from futransformer.perplexity import split_windows
from futransformer.tokenizer import Tokenizer


def main() -> int:
    """Score the text by each precision beside BF16."""
    parser = argparse.ArgumentParser(description="what number formats cost a model on a text")
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("text", type=Path, help="UTF-8 text")
    parser.add_argument("precisions", nargs="+", help="as of `futransformer run --precision`")
    parser.add_argument("--context", type=int, default=512, help="tokens a window (default: 512)")
    parser.add_argument("--windows", type=int, default=4, help="of the text, from its beginning (default: 4)")
    args = parser.parse_args()
    try:
        tokens = Tokenizer(args.model).encode(args.text.read_text(encoding="utf-8"))
        at_once = len(split_windows(tokens, args.context, args.windows))
        room = at_once * pages_for(args.context) * PAGE_SIZE
        baseline = Llama.from_pretrained(args.model, cache_tokens=room)
        print(f"| {baseline.config.name} | perplexity | over BF16 | KL divergence | same top token |")
        print("| --- | --- | --- | --- | --- |")
        for precision in args.precisions:
            model = Llama.from_pretrained(args.model, precision=precision, cache_tokens=room)
            found = compare(
                model,
                baseline,
                tokens,
                context=args.context,
                windows=args.windows,
                batch=at_once,
                through="decode",
            )
            figures = found.figures()
            print(
                f"| {precision} | {found.result.perplexity:.3f} | {figures['percent_over_baseline']:+.2f} % "
                f"| {figures['kl_divergence']['mean']:.4f} | {100 * figures['top1_agreement']['mean']:.1f} % |",
                flush=True,
            )
    except FuTransformerError as error:
        print(f"compare_precisions: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
