"""The bodies of requests.  A field that is not known, or not done here, is refused: none is passed over."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_STOPS, MAX_STOP_LENGTH = 16, 256
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Token = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Flag = Annotated[bool, Field(strict=True)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class GenerationBody(Body):
    """``POST /generation``: a prompt that is continued."""

    prompt: str = Field(min_length=1, examples=["Question: Where were the 2004 Olympics held?\nAnswer:"])
    max_tokens: int | None = Field(None, gt=0, le=256, strict=True, examples=[64])
    max_new_tokens: int | None = Field(
        None, gt=0, le=256, strict=True, description="Another name of max_tokens."
    )
    top_k: int | None = Field(None, gt=0, lt=1 << 31, strict=True, examples=[50])
    top_p: Number | None = Field(None, gt=0.0, lt=1.0, examples=[0.5])
    temperature: Number | None = Field(None, gt=0.0, lt=1.0, examples=[0.7])
    greedy: Flag | None = Field(None, description="Take the most likely token each time.")

    @model_validator(mode="after")
    def _one_length(self) -> GenerationBody:
        if (self.max_tokens is None) == (self.max_new_tokens is None):
            raise ValueError("give max_tokens (or, as its other name, max_new_tokens)")
        if self.greedy and not (self.top_k is self.top_p is self.temperature is None):
            raise ValueError("greedy draws nothing; leave out top_k, top_p and temperature")
        return self

    @property
    def length(self) -> int:
        return self.max_tokens or self.max_new_tokens or 0


class GenerationAnswer(BaseModel):
    text: str


class StreamOptions(Body):
    include_usage: Flag = False
    include_obfuscation: Literal[False] | None = None


_NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "best_of": (None, 1),
    "suffix": (None,),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
}
"""What OpenAI has and this server has not, with the values that ask for nothing."""


_ELSEWHERE = {
    "max_new_tokens": "max_tokens",
    "inputs": "prompt",
    "do_sample": "temperature (0 draws nothing)",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "eos_token_id": "stop_token_ids",
    "num_return_sequences": "n",
}
"""What other servers and libraries call a field."""


class Common(Body):
    """What completions and chats have alike."""

    model: str | None = None
    temperature: Number = Field(1.0, ge=0.0, le=2.0)
    top_p: Number = Field(1.0, gt=0.0, le=1.0)
    n: int = Field(1, ge=1, le=128, strict=True)
    stream: Flag = False
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    seed: int | None = Field(None, ge=0, lt=1 << 63, strict=True)
    user: str | None = Field(None, max_length=512, description="Of no effect.")
    # further than OpenAI
    top_k: int = Field(0, ge=-1, lt=1 << 31, strict=True, description="0 or -1: all tokens.")
    min_p: Number = Field(0.0, ge=0.0, le=1.0)
    repetition_penalty: Number = Field(1.0, ge=0.001, le=1000.0)
    ignore_eos: Flag = False
    stop_token_ids: list[Token] = Field(default_factory=list, max_length=64)
    # see _NOT_OFFERED
    presence_penalty: Literal[0] | None = Field(None, description="Not offered; see repetition_penalty.")
    frequency_penalty: Literal[0] | None = Field(None, description="Not offered; see repetition_penalty.")
    logit_bias: dict[str, float] | None = Field(None, max_length=0, description="Not offered.")

    @model_validator(mode="before")
    @classmethod
    def _offered(cls, data: Any) -> Any:
        for name, neutral in _NOT_OFFERED.items() if isinstance(data, dict) else ():
            value = data.get(name)
            same = any(value == one and type(value) is not bool for one in neutral)
            if not same and not (name == "best_of" and value == data.get("n")):
                raise ValueError(f"{name} is not offered by this server; leave it out")
        for name in _ELSEWHERE.keys() & (data if isinstance(data, dict) else {}):
            raise ValueError(f"there is no {name}; it is called {_ELSEWHERE[name]} here")
        return data

    @field_validator(
        "temperature", "top_p", "n", "stream", "top_k", "min_p", "repetition_penalty", mode="before"
    )
    @classmethod
    def _null_is_the_default(cls, value: Any, info: Any) -> Any:
        return cls.model_fields[info.field_name].default if value is None else value

    @field_validator("presence_penalty", "frequency_penalty", mode="before")
    @classmethod
    def _zero_in_any_form(cls, value: Any) -> Any:
        return 0 if isinstance(value, float) and value == 0 else value

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Common:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for stream=true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


Tokens = Annotated[list[Token], Field(min_length=1)]


class CompletionBody(Common):
    """``POST /v1/completions``."""

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Tokens], Field(min_length=1)]
    )
    max_tokens: int | None = Field(16, ge=0, lt=1 << 31, strict=True)
    logprobs: int | None = Field(None, ge=0, le=20, strict=True)
    echo: Flag = False
    best_of: int | None = Field(None, ge=1, strict=True)
    suffix: None = Field(None, description="Not offered.")

    @field_validator("echo", mode="before")
    @classmethod
    def _null_is_false(cls, value: Any) -> Any:
        return False if value is None else value

    @model_validator(mode="after")
    def _possible(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens of 0 gives nothing; it is for echo=true")
        if self.echo and self.stream:
            raise ValueError("echo cannot be streamed")
        return self


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = Field(None, max_length=64)

    @property
    def plain(self) -> dict[str, str]:
        """The message as templates read it."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        name = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": "".join(parts), **name}


class TextFormat(Body):
    type: Literal["text"]


class ChatBody(Common):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=1024)
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31, strict=True)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31, strict=True)
    logprobs: Flag | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20, strict=True)
    response_format: TextFormat | None = None
    tools: list[Any] | None = Field(None, max_length=0, description="Not offered.")
    tool_choice: Literal["none", "auto"] | None = None

    @model_validator(mode="after")
    def _possible(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is for logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("max_tokens and max_completion_tokens say the same; use one of them")
        return self
