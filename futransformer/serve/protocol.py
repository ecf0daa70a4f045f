"""What a request may ask: OpenAI's fields and vLLM's further ones, by their names.

A field that nobody here knows is ignored, as OpenAI's server and vLLM do. One that is known and not served is refused
by its name, unless its value changes nothing: an answer is never silently another one than was asked for. ``null`` is a
field left out. Ranges are checked by ``SamplingParams``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from futransformer.serve.errors import refused

# Fields that would change the answer, with the values (beside null) that change nothing.
UNSERVED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
MOST_STOPS = 64  # strings, each of which is looked for at every token; OpenAI takes 4
MOST_TOP_LOGPROBS = 20  # OpenAI's limit of chat; completions have 5 there, and 20 here
Integer = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]  # what is refused is named in the message


class StreamOptions(BaseModel):
    """What a stream has beside text."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class Request(BaseModel):
    """The fields that both endpoints have."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Integer | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: Integer | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Integer] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    def check_served(self) -> None:
        """Refuse, by its name, what would change the answer and is not served."""
        for name, value in (self.model_extra or {}).items():
            if name in UNSERVED and value is not None and value not in UNSERVED[name]:
                raise refused(f"{name} is not served here: leave it out", name, "unsupported_parameter")
        if isinstance(self.stop, list) and len(self.stop) > MOST_STOPS:
            raise refused(f"stop is at most {MOST_STOPS} strings, not {len(self.stop)}", "stop")
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options are of a stream: add stream, or leave them out", "stream_options")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(Request):
    """A text, or texts, to continue; as text or as token ids."""

    prompt: str | list[str] | list[Integer] | list[list[Integer]]
    best_of: Integer | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP_LOGPROBS)

    def check_served(self) -> None:
        """Refuse a choice among more samples than are asked for, too."""
        super().check_served()
        if self.best_of not in (None, self.n or 1):
            raise refused("best_of is not served here, but as n: leave it out", "best_of", "unsupported_parameter")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, as a list of them."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise refused("prompt is an empty list: give at least one prompt", "prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # one list of token ids
        return self.prompt


class Part(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(strict=True)

    type: str
    text: str | None = None


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part] | None = None

    def turn(self, where: str) -> dict[str, str]:
        """Role and text, as a chat template takes them; a part that is no text is refused by its type."""
        if (self.model_extra or {}).get("tool_calls"):
            raise refused("tools are not served here: a message has tool_calls", f"{where}.tool_calls")
        content = self.content or ""
        if not isinstance(content, str):
            other = next((part.type for part in content if part.type != "text"), None)
            if other is not None:
                raise refused(f"the model reads text alone: a message has a part of {other!r}", f"{where}.content")
            content = "".join(part.text or "" for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(Request):
    """A conversation to answer."""

    messages: list[Message]
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP_LOGPROBS)

    def check_served(self) -> None:
        """Refuse alternatives of tokens that are not reported, too."""
        super().check_served()
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs needs logprobs: add it, or leave it out", "top_logprobs")

    @property
    def turns(self) -> list[dict[str, str]]:
        """The conversation as a chat template takes it."""
        if not self.messages:
            raise refused("messages is empty: give at least one", "messages")
        return [message.turn(f"messages[{index}]") for index, message in enumerate(self.messages)]
