"""``futransformer serve``: a model behind OpenAI's HTTP interface (docs/serving.md)."""

from __future__ import annotations

import argparse
import importlib.util
import os
from typing import TYPE_CHECKING

from futransformer.cli.llm import add_engine, load_llm
from futransformer.cli.model import SMALL_MODEL, model_folder, say
from futransformer.generator.errors import InputError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

KEY_VARIABLE = "FUTRANSFORMER_API_KEY"
PACKAGES = ("fastapi", "prometheus_client", "uvicorn")  # the extra [serve]
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI's clients call it",
        description="Serve a model over HTTP: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics. "
        "On a Hopper GPU through the kernels, elsewhere through the CPU reference.",
    )
    add_engine(parser, most=64, warm_up=20)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0: a free one (default: 8000)")
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="what requests call the model; answers carry the first (default: the folder's name)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"what /v1 asks of clients (default: the variable {KEY_VARIABLE}, which other users do not see)",
    )
    parser.add_argument(
        "--max-queue",
        type=int,
        default=256,
        metavar="N",
        help="sequences that wait beside those that run; more are answered 429 (default: 256)",
    )
    parser.add_argument(
        "--max-tokens-limit", type=int, metavar="N", help="new tokens that a request may ask for (default: what fits)"
    )
    parser.add_argument(
        "--grace-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="that answers under way may take when the server is told to end (default: 30)",
    )
    parser.add_argument("--access-log", action="store_true", help="print a line for each request")
    parser.set_defaults(handler=_serve)


def _serve(args: argparse.Namespace) -> int:
    lacking = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if lacking:
        raise InputError(
            f"a server needs {', '.join(lacking)}, which is not installed; run: pip install 'futransformer[serve]'"
        )
    from futransformer.sampling_defaults import recommended_sampling  # noqa: PLC0415 - see futransformer.cli
    from futransformer.serve.server import HttpServer, bind  # noqa: PLC0415
    from futransformer.serve.settings import ServeSettings  # noqa: PLC0415
    from futransformer.tokenizer import Tokenizer  # noqa: PLC0415

    key = os.environ.get(KEY_VARIABLE) if args.api_key is None else args.api_key
    folder = model_folder(args.model)
    settings = ServeSettings(
        names=tuple(args.served_model_name or [SMALL_MODEL if args.model == SMALL_MODEL else folder.resolve().name]),
        max_num_seqs=args.max_num_seqs,
        max_queue=args.max_queue,
        max_tokens_limit=args.max_tokens_limit,
        api_key=key,
        grace_seconds=args.grace_seconds,
        sampling=recommended_sampling(folder),
    )
    with bind(args.host, args.port) as listener:
        llm = load_llm(args, folder)
        server = HttpServer(
            settings,
            llm.engine,
            Tokenizer(folder),  # another than the engine's, which works in another thread
            listener,
            max_model_len=llm.engine.max_model_len,
            access_log=args.access_log,
        )
        host, port = listener.getsockname()[:2]
        if key is None and args.host not in LOOPBACK:
            say(f"warning: whoever reaches {host}, port {port}, may use the model: set --api-key or {KEY_VARIABLE}")
        server.run(lambda: say(f"serving {', '.join(settings.names)} on {_url(host, port)}"))
    say("ended")
    return 0


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
