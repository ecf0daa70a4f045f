"""``python -m tests.serve``: a server of a random model under the load of clients in another process.

The closed loop of ``futransformer bench serve``, over HTTP: what the server adds to the engine is the difference. Its
texts are a word a token, so that each step has something to send. On a Hopper GPU by the kernels in ``--kernels`` (one
export a shape and precision) or of the cache, elsewhere on the reference (set OMP_WAIT_POLICY=passive, as the command
line does for itself).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from futransformer.bench.random_model import random_llama
from futransformer.driver import hopper_problem
from futransformer.engine import Engine
from futransformer.generator.config import LlamaConfig, load_config
from futransformer.generator.precision import get_precision
from futransformer.kv_cache import pages_for
from futransformer.library import load_kernels
from futransformer.ops.interface import Ops
from futransformer.reference import ReferenceOps
from futransformer.serve.server import HttpServer, bind
from futransformer.serve.settings import ServeSettings
from futransformer.tokenizer import Tokenizer


def word_tokenizer(folder: Path, vocabulary: int) -> Tokenizer:
    """A word for each token."""
    words = models.WordLevel({f"t{index}": index for index in range(vocabulary)}, unk_token="t0")
    PreTrainedTokenizerFast(tokenizer_object=Backend(words)).save_pretrained(folder)
    return Tokenizer(folder)


def operations(config: LlamaConfig, precision: str, kernels: Path | None) -> Ops:
    """Kernels on a Hopper GPU, else the reference."""
    if hopper_problem() is not None:
        return ReferenceOps(config, copy=get_precision(precision).copy)
    return load_kernels(config, precision, folder=kernels)


def main() -> None:
    """Serve, run the clients for a round that captures graphs, and for those that count; print what they saw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a named shape (default: llama-3.1-8b)")
    parser.add_argument("--precision", default="fp8-int4-head8", help="(default: fp8-int4-head8)")
    parser.add_argument("--kernels", type=Path, metavar="DIR", help="an export of this shape and precision")
    for name, default in (("streams", 64), ("rounds", 4), ("prompt", 512), ("output", 256)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"(default: {default})")
    args = parser.parse_args()
    config = load_config(args.model)
    pages = args.streams * (pages_for(args.prompt + args.output) + 1)
    ops = operations(config, args.precision, args.kernels)
    model = random_llama(config, get_precision(args.precision), ops, pages)
    with tempfile.TemporaryDirectory() as folder, bind("127.0.0.1", 0) as listener:
        tokenizer = word_tokenizer(Path(folder), config.vocab_size)
        engine = Engine(model, tokenizer, max_num_seqs=args.streams, enable_prefix_caching=False)
        settings = ServeSettings((args.model,), max_num_seqs=args.streams, grace_seconds=0)
        server = HttpServer(settings, engine, tokenizer, listener, max_model_len=engine.max_model_len)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        load = ["--streams", args.streams, "--prompt", args.prompt, "--output", args.output]
        load += ["--vocabulary", config.vocab_size]
        command = [sys.executable, "-m", "tests.serve.clients", url, *map(str, load)]

        def drive() -> None:
            try:
                for rounds in (1, args.rounds):
                    subprocess.run([*command, "--rounds", str(rounds)], check=True)
            finally:
                server.end()

        server.run(threading.Thread(target=drive).start)


if __name__ == "__main__":
    main()
