"""InputProcessor: what a user asks, as a request the core can take. Here text ends and token ids begin.

    prompt, SamplingParams -> InputProcessor -> EngineCoreRequest -> EngineCore

Shared by `LLM` and a server, whose core lives in another process: so a bad request is refused on this side. Labs: built by
none. May not know torch or the core's insides.
"""

from __future__ import annotations

import hashlib
import itertools
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from minivllm.components import Components
from minivllm.config import EngineConfig
from minivllm.core.step import EngineCoreRequest
from minivllm.sampling_params import SamplingParams
from minivllm.text.tokenizer import Tokenizer

# A prompt as vLLM takes it: a text, token ids, {"prompt": text}, or {"prompt_token_ids": ids} (then "prompt" is for show).
Prompt = str | Sequence[int] | Mapping[str, Any]
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(slots=True)
class ProcessedRequest:
    """A request as its user sees it, and as the core does: one request for each of the n completions.

    request_id is unique in the life of the engine: a user may reuse an id while its old request is being aborted.
    """

    request_id: str
    user_id: str
    prompt: str | None
    cores: list[EngineCoreRequest]

    @property
    def core(self) -> EngineCoreRequest:
        """The first: what it says of prompt and parameters goes for all."""
        return self.cores[0]


class InputProcessor:
    """Prompts and parameters to core requests. What a user can get wrong about one request is refused here, as ValueError."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        num_blocks: int,
        eos_token_ids: tuple[int, ...] = (),
        components: Components | None = None,
    ) -> None:
        if config.max_model_len is None:
            raise ValueError("InputProcessor needs a settled config: call EngineConfig.fit_max_model_len() first.")
        self.config = config
        self.max_model_len = config.max_model_len
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.num_blocks = num_blocks
        self.eos_token_ids = eos_token_ids
        self.components = components or Components()
        self._num_drawn = itertools.count()

    def get_tokenizer(self) -> Tokenizer:
        """Raises ValueError for a model without one."""
        if self.tokenizer is None:
            raise ValueError(f"{self.config.model} has no tokenizer: pass prompt_token_ids instead of text or messages.")
        return self.tokenizer

    def process(
        self, user_id: str, prompt: Prompt, params: SamplingParams, *, priority: int = 0, arrival_time: float | None = None
    ) -> ProcessedRequest:
        """Tokenize and check one request. Raises ValueError naming the value, the limit and what to change."""
        _check_unicode("request_id", user_id)
        params = self._checked_params(params)
        text, token_ids, cache_salt = self._parse(prompt)
        token_ids = self._truncated(token_ids, params)
        self._check_prompt(token_ids)
        if not isinstance(priority, Integral) or not -(2**63) <= priority < 2**63:
            raise ValueError(f"priority must be an integer of 64 bits, got {priority!r:.80}.")
        if priority and self.config.scheduling_policy != "priority":
            raise ValueError(
                f'priority={priority} needs LLM(scheduling_policy="priority"); this engine serves first come first.'
            )
        request_id = f"{user_id}-{uuid.uuid4().hex[:8]}"
        seed = self._draw_seed() if params.seed is None else params.seed
        cores = [
            EngineCoreRequest(
                request_id=request_id if params.n == 1 else f"{i}_{request_id}",
                prompt_token_ids=token_ids,
                sampling_params=params,
                seed=seed + i,
                eos_token_ids=self.eos_token_ids,
                arrival_time=time.monotonic() if arrival_time is None else arrival_time,
                priority=int(priority),
                cache_salt=cache_salt,
                skip_reading_prefix_cache=params.prompt_logprobs is not None,
                external_req_id=user_id,
            )
            for i in range(params.n)
        ]
        return ProcessedRequest(request_id, user_id, text, cores)

    def _parse(self, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        """(text, token ids, cache salt) of a prompt in any of its shapes."""
        if isinstance(prompt, str):
            return prompt, self._encode(prompt), None
        if not isinstance(prompt, Mapping):
            return None, _as_token_ids(prompt), None
        given = {key: value for key, value in prompt.items() if value is not None}
        if unknown := [key for key in given if key not in _PROMPT_KEYS]:
            raise ValueError(f"prompt[{unknown[0]!r}] is not supported by minivllm; a prompt has {', '.join(_PROMPT_KEYS)}.")
        salt = given.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise ValueError(f"prompt['cache_salt'] must be a non-empty string, got {salt!r:.80}.")
        _check_unicode("cache_salt", salt or "")
        text = given.get("prompt")
        if "prompt_token_ids" in given:
            return text, _as_token_ids(given["prompt_token_ids"]), salt
        if not isinstance(text, str):
            raise ValueError(f'A prompt dict needs "prompt" (a text) or "prompt_token_ids", got {dict(prompt)!r:.80}.')
        return text, self._encode(text), salt

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("This model has no tokenizer: pass prompt_token_ids instead of text.")
        if not text:  # also where the tokenizer would add a BOS: an empty text asks for nothing
            raise ValueError("The prompt is empty: it must have at least one character.")
        return self.tokenizer.encode(text)

    def _truncated(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        keep = params.truncate_prompt_tokens
        if keep is None:
            return token_ids
        if keep >= self.max_model_len:
            raise ValueError(
                f"SamplingParams.truncate_prompt_tokens={keep} is too long: max_model_len={self.max_model_len} leaves room for"
                f" {self.max_model_len - 1} prompt tokens."
            )
        if keep == -1:
            keep = max(1, self.max_model_len - (params.max_tokens or 1))
        return token_ids[-keep:]

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise ValueError("The prompt is empty: it must have at least one token.")
        if len(token_ids) >= self.max_model_len:
            usable, size = self.num_blocks - 1, self.config.block_size
            raise ValueError(
                f"The prompt has {len(token_ids)} tokens; with max_model_len={self.max_model_len} it may have at most"
                f" {self.max_model_len - 1}, so that one more can be generated. Shorten it, or raise max_model_len (the KV"
                f" pool, {usable} blocks of {size}, holds {usable * size} tokens: kv_cache_memory_bytes if that is the limit)."
            )
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"Token id {bad} in the prompt is not in the vocabulary: ids go from 0 to {self.vocab_size - 1}.")

    def _checked_params(self, params: SamplingParams) -> SamplingParams:
        """A copy, checked again: the caller's may have changed since it was made, and may change while the request runs."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, got {params!r:.80}.")
        params = params.replaced()
        _check_unicode("SamplingParams.stop", *params.stop)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            if bad := [t for t in getattr(params, name) if t >= self.vocab_size]:
                raise ValueError(
                    f"SamplingParams.{name}={bad[0]} is not in the vocabulary: ids go from 0 to {self.vocab_size - 1}."
                )
        if params.stop and self.tokenizer is None:
            raise ValueError("SamplingParams.stop needs a tokenizer, and this model has none: use stop_token_ids.")
        for capability, asked in asked_of_sampler(params).items():
            self.components.require("sampler", capability, f"SamplingParams.{asked}")
        params.bad_words_token_ids = [ids for word in params.bad_words for ids in self._spellings(word)]
        return params

    def _spellings(self, word: str) -> list[list[int]]:
        """The token ids of a bad word: as it stands and, as in vLLM, after a space, if that is as many tokens and another first
        one (else the first spelling already keeps it out)."""
        if self.tokenizer is None:
            raise ValueError("SamplingParams.bad_words needs a tokenizer, and this model has none: leave it out.")
        bare, spaced = (self.tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False) for prefix in ("", " "))
        found = [bare]
        if spaced[0] != bare[0] and len(spaced) == len(bare):
            found.append(spaced)
        if bad := [t for ids in found for t in ids if t >= self.vocab_size]:
            raise ValueError(f"SamplingParams.bad_words has {word!r}, whose token {bad[0]} the model does not know.")
        return found

    def _draw_seed(self) -> int:
        """A seed for a request that brings none: the n-th such request of an engine gets the same one in every run."""
        text = f"{self.config.seed}/{next(self._num_drawn)}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1  # fits a signed 64-bit


def as_prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt or several, as vLLM takes them, as a list. A list (or array) of integers is one prompt of token ids."""
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(prompts, (str, bytes, bytearray, Mapping)):  # bytes, though iterable, are refused as one prompt
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a text, token ids, a dict, or a list of those, got {prompts!r:.80}.")
    items = list(prompts)
    if not items:
        raise ValueError("There is no prompt: the list is empty.")
    return [items] if all(isinstance(item, Integral) for item in items) else items


def end_token_ids(tokenizer: Tokenizer | None, of_the_model: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """The tokens that end an output: the tokenizer's and the model's own. One beyond the vocabulary (a tokenizer may know more
    tokens than the model) can never come."""
    own = [] if tokenizer is None or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tuple(i for i in dict.fromkeys([*own, *of_the_model]) if i < vocab_size)


def asked_of_sampler(params: SamplingParams) -> dict[str, str]:
    """What the parameters ask of the sampler beyond the argmax: capability -> the field and value that ask for it."""
    asked = {
        "temperature": (not params.is_greedy, "temperature"),
        "top_k": (params.top_k > 0, "top_k"),
        "top_p": (params.top_p < 1, "top_p"),
        "min_p": (params.min_p > 0, "min_p"),
        "logprobs": (params.logprobs is not None, "logprobs"),
        "penalties": (params.has_penalties, _first_penalty(params)),
        "logit_bias": (bool(params.logit_bias), "logit_bias"),
        "allowed_token_ids": (bool(params.allowed_token_ids), "allowed_token_ids"),
        "bad_words": (bool(params.bad_words), "bad_words"),
    }
    return {name: f"{field}={getattr(params, field)!r:.80}" for name, (is_asked, field) in asked.items() if is_asked}


def _first_penalty(params: SamplingParams) -> str:
    neutral = {"repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0}
    return next((name for name, off in neutral.items() if getattr(params, name) != off), "presence_penalty")


def _check_unicode(name: str, *texts: str) -> None:
    """JSON can spell half a character, "\\ud800", which no other process and no answer can."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name} is not valid Unicode (a lone surrogate): {text!r:.60}.") from None


def _as_token_ids(value: Any) -> list[int]:
    value = value.tolist() if hasattr(value, "tolist") else value  # NumPy's and torch's arrays
    if isinstance(value, (str, bytes, bytearray, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"A prompt must be a text, token ids (a list of integers) or a dict, got {value!r:.80}.")
    token_ids = list(value)
    for token_id in token_ids:
        if not isinstance(token_id, Integral) or isinstance(token_id, bool):
            raise ValueError(f"A prompt's token ids must be integers, got {token_id!r:.80}.")
    return [int(token_id) for token_id in token_ids]
