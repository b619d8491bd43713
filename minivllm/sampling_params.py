"""What a request asks for: vLLM's SamplingParams, its names and its rules. Pure Python, used by every layer.

Every field of vLLM's class is known here. The ones this engine does not serve yet are *refused by name* when they
differ from their default, never accepted and ignored.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field, fields
from typing import Any

MAX_LOGPROBS = 20
GREEDY_EPS = 1e-5
MIN_TEMPERATURE = 1e-2

# Fields of vLLM's SamplingParams that are not served, with the value that means "not asked for".
_UNSUPPORTED: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "bad_words": None,
    "include_stop_str_in_output": False,
    "prompt_logprobs": None,
    "flat_logprobs": False,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "logits_processors": None,
    "truncate_prompt_tokens": None,
    "output_kind": None,
    "structured_outputs": None,
    "guided_decoding": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "extra_args": None,
    "thinking_token_budget": None,
    "skip_reading_prefix_cache": None,
    "repetition_detection": None,
}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(slots=True, init=False)
class SamplingParams:
    """Sampling settings of one request.

    Fields (defaults as in vLLM):
        n: completions per prompt. Only 1 is served.
        temperature: >= 0. Below 1e-5 is greedy (argmax); values between are raised to 0.01.
        top_p: in (0, 1]. 1 is off.   top_k: 0 or -1 is off, else keep the k largest logits.   min_p: in [0, 1].
        seed: the request's own noise. The same seed and the same logits give the same tokens, whatever the neighbours.
        stop: string or list of strings; the text ends before the first match.
        stop_token_ids: token ids that end the output (kept in token_ids, not in text).
        ignore_eos: the model's end tokens do not end the output.
        max_tokens: at most this many output tokens; None is up to max_model_len.   min_tokens: end tokens are masked before.
        logprobs: number of top log-probabilities to return per token (0 is the sampled token's alone); None is off.

    Raises ValueError naming the field, its value and the limit; also for a vLLM field that is not supported.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None

    def __init__(
        self,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | list[str] | None = None,
        stop_token_ids: list[int] | None = None,
        ignore_eos: bool = False,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        logprobs: int | None = None,
        **unsupported: Any,
    ) -> None:
        for name, value in unsupported.items():
            self._refuse(name, value)
        self.n = n
        self.temperature = temperature
        self.top_p = top_p
        self.top_k = top_k
        self.min_p = min_p
        self.seed = None if seed == -1 else seed
        self.stop = [stop] if isinstance(stop, str) else _as_list("stop", stop)
        self.stop_token_ids = _as_list("stop_token_ids", stop_token_ids)
        self.ignore_eos = ignore_eos
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.logprobs = logprobs
        self._validate()
        if self.is_greedy:  # as in vLLM: nothing to filter when the answer is the argmax
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        elif self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE

    @staticmethod
    def _refuse(name: str, value: Any) -> None:
        known = [f.name for f in fields(SamplingParams)] + list(_UNSUPPORTED)
        if name not in _UNSUPPORTED:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"SamplingParams has no field {name!r}.{hint}")
        default = _UNSUPPORTED[name]
        empty = value is None or (isinstance(value, (list, dict)) and not value)
        if not (empty or value == default):
            raise ValueError(f"SamplingParams.{name}={value!r} is not supported by minivllm; leave it at {default!r}.")

    def _validate(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ValueError(f"SamplingParams.{name} must be {rule}, got {getattr(self, name)!r}.")

        need(_is_int(self.n) and self.n >= 1, "n", "an integer of at least 1")
        if self.n > 1:
            raise ValueError(
                f"SamplingParams.n={self.n} is not supported by minivllm: only n=1. Send the prompt {self.n} times instead."
            )
        need(_is_real(self.temperature) and self.temperature >= 0, "temperature", "a finite number of at least 0")
        need(_is_real(self.top_p) and 0 < self.top_p <= 1, "top_p", "in (0, 1] (1 is off)")
        need(_is_int(self.top_k) and self.top_k >= -1, "top_k", "0 or -1 (off) or a positive integer")
        need(_is_real(self.min_p) and 0 <= self.min_p <= 1, "min_p", "in [0, 1] (0 is off)")
        need(self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**63), "seed", "None or a 64-bit integer")
        need(all(isinstance(s, str) and s for s in self.stop), "stop", "made of non-empty strings")
        need(
            all(_is_int(t) and t >= 0 for t in self.stop_token_ids),
            "stop_token_ids",
            "a list of token ids (integers, at least 0)",
        )
        need(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False")
        need(
            self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            "None or an integer of at least 1",
        )
        need(_is_int(self.min_tokens) and self.min_tokens >= 0, "min_tokens", "an integer of at least 0")
        need(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"at most max_tokens={self.max_tokens}",
        )
        need(
            self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS),
            "logprobs",
            f"None or an integer from 0 to {MAX_LOGPROBS}",
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPS


def _as_list(name: str, value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    raise ValueError(f"SamplingParams.{name} must be a list, got {value!r}.")
