"""Answer a file of questions, all at a time: one JSON object a line, in the order in which answers are finished.

    python examples/answer_file.py ~/models/Llama-3.1-8B-Instruct questions.txt > answers.jsonl

A line of the file is a question. An answer depends neither on those beside it nor on when it was asked (see
docs/engine.md for what exactly), so a file may be cut and its parts be answered apart.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from futransformer import LLM, SamplingParams
from futransformer.engine import RequestOutput
from futransformer.generator.errors import FuTransformerError
from futransformer.tokenizer import Message


def main() -> int:
    """Ask, print, report."""
    parser = argparse.ArgumentParser(description="answer a file of questions, one a line, as JSON lines")
    parser.add_argument("model", type=Path, help="a Hugging Face folder of a model that chats")
    parser.add_argument("questions", type=Path, help="UTF-8 text, a question a line")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer (default: 256)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(default: 0, the likeliest tokens)")
    args = parser.parse_args()
    questions = [line for line in args.questions.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        llm = LLM(args.model)
        each = [
            SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=number)
            for number in range(len(questions))
        ]
        start = time.monotonic()
        count = answer(llm, questions, each)
    except FuTransformerError as error:
        print(f"answer_file: {error}", file=sys.stderr)
        return 2
    seconds = time.monotonic() - start
    print(f"{len(questions)} answers, {count} tokens, {count / seconds:.1f} tokens/s", file=sys.stderr)
    return 0


def answer(llm: LLM, questions: list[str], each: list[SamplingParams]) -> int:
    """Print every answer when it is finished; return how many tokens they have."""
    texts: dict[str, RequestOutput] = {}
    conversations: list[list[Message]] = [[{"role": "user", "content": question}] for question in questions]
    with llm.stream_chat(conversations, each) as stream:
        for delta in stream:
            text = texts.setdefault(delta.request_id, delta)
            if text is not delta:
                text.add(delta)
            if delta.finished:
                (output,) = text.outputs
                line = {
                    "question": questions[int(delta.request_id)],
                    "answer": output.text,
                    "finish_reason": output.finish_reason,
                }
                print(json.dumps(line, ensure_ascii=False), flush=True)
    return sum(len(text.outputs[0].token_ids) for text in texts.values())


if __name__ == "__main__":
    sys.exit(main())
