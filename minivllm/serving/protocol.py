"""What clients send: OpenAI's requests as pydantic models, and what becomes of them: prompts and SamplingParams. Labs: built by
none. May not know the engine or FastAPI.

OpenAI's fields, and vLLM's beyond them. What is not supported is refused by name, unless its value asks for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from minivllm.sampling_params import MAX_LOGPROBS, SamplingParams

# What has the same name and meaning in SamplingParams.
_SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "allowed_token_ids", "bad_words", "seed", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "min_tokens", "prompt_logprobs", "skip_special_tokens", "truncate_prompt_tokens",
)  # fmt: skip

# Values of unsupported fields that ask for nothing (None always does). The rest is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),  # without tools there is nothing to choose
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "suffix": ("",),
    "service_tier": ("auto", "default"),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "length_penalty": (1.0,),
}


class ApiError(Exception):
    """An answer in OpenAI's error shape. param: the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400. Without a param, the one that the message begins with: our ValueErrors name their field."""
    named = re.match(r"SamplingParams\.(\w+)|(?:The )?(prompt|messages|priority|request_id|cache_salt)\b", message)
    param = param or (named and (named[1] or named[2])) or ("prompt" if "in the prompt" in message else None)
    code = "context_length_exceeded" if "max_model_len" in message and param == "prompt" else None
    return ApiError(400, message.replace("SamplingParams.", ""), param=param, code=code)


class StreamOptions(BaseModel):
    """What a stream tells beside its text."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What both endpoints take. None is "not given": the model's default."""

    model_config = ConfigDict(extra="allow")  # so that `check` can name what is not supported

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # says who asks, and nothing about the answer
    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    return_token_ids: bool = False

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None

    def check(self) -> None:
        """Raises ApiError for a field that is not supported."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and value not in _NEUTRAL.get(name, ()):
                shown = f"{name}={value!r:.60}" if name in _NEUTRAL else f"the field {name!r}"
                raise ApiError(400, f"minivllm does not support {shown}; leave it out.", param=name, code="unsupported_field")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true.", param="stream_options")
        if self.cache_salt == "":
            raise ApiError(400, "cache_salt must not be empty.", param="cache_salt")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def _params(self, default: SamplingParams, **changes: Any) -> SamplingParams:
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS if getattr(self, name) is not None}
        try:
            return default.replaced(**given, **changes)
        except ValueError as error:
            raise bad_request(str(error)) from None

    def _check_logprobs(self, name: str, value: int | None) -> None:
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise ApiError(400, f"{name} must be from 0 to {MAX_LOGPROBS}, got {value}.", param=name)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None

    def check(self) -> None:
        super().check()
        self._check_logprobs("logprobs", self.logprobs)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(400, f"minivllm does not support best_of={self.best_of}: only best_of=n.", param="best_of")

    def sampling_params(self, default: SamplingParams) -> SamplingParams:
        max_tokens = default.max_tokens if self.max_tokens is None else self.max_tokens
        changes: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": self.logprobs}
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            changes["prompt_logprobs"] = self.logprobs
        return self._params(default, **changes)

    def prompts(self) -> list[Any]:
        """Each a text or token ids."""
        several = isinstance(self.prompt, list) and (not self.prompt or not isinstance(self.prompt[0], int))
        if several and not self.prompt:
            raise ApiError(400, "The prompt is empty: it must have at least one token.", param="prompt")
        each: list[Any] = list(self.prompt) if several else [self.prompt]
        return [self._with_salt(prompt) for prompt in each]

    def _with_salt(self, prompt: Any) -> Any:
        if self.cache_salt is None:
            return prompt
        return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, "cache_salt": self.cache_salt}


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="allow")
    role: Any = None  # checked, with better words, where it is rendered
    content: Any = None


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        self._check_logprobs("top_logprobs", self.top_logprobs)
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true.", param="top_logprobs")

    def sampling_params(self, default: SamplingParams) -> SamplingParams:
        """Without a limit a chat's answer goes on to max_model_len, as in OpenAI's API, unless the model recommends one."""
        given = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        recommended = None if default.max_tokens == SamplingParams().max_tokens else default.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._params(default, max_tokens=recommended if given is None else given, logprobs=logprobs)

    def template_options(self) -> dict[str, Any]:
        return {
            "add_generation_prompt": self.add_generation_prompt,
            "chat_template": self.chat_template,
            "template_kwargs": self.chat_template_kwargs,
        }


class TokenizeRequest(BaseModel):
    """POST /tokenize: a text, or a conversation."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @property
    def kind(self) -> Literal["prompt", "messages"]:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "Give either a prompt or messages.", param="prompt")
        return "messages" if self.prompt is None else "prompt"


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    tokens: list[int]
