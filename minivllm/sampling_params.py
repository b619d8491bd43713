"""What a request asks for: vLLM's SamplingParams, its names and its rules. Pure Python, used by every layer.

Every field of vLLM's class is known here. The ones this engine does not serve yet are *refused by name* when they
differ from their default, never accepted and ignored.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

MAX_LOGPROBS = 20
GREEDY_EPS = 1e-5
MIN_TEMPERATURE = 1e-2
MAX_BIAS = 100.0
REPETITION_PENALTIES = 0.01, 100.0  # beyond, a float32 logit divided by it may be no number any more

# Fields of vLLM's SamplingParams that are not served, with the value that means "not asked for".
_UNSUPPORTED: dict[str, Any] = {
    "flat_logprobs": False,
    "detokenize": True,
    "spaces_between_special_tokens": True,
    "logits_processors": None,
    "output_kind": None,
    "structured_outputs": None,
    "guided_decoding": None,
    "extra_args": None,
    "thinking_token_budget": None,
    "skip_reading_prefix_cache": None,
    "repetition_detection": None,
}

_INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "truncate_prompt_tokens")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _are_token_ids(values: Any) -> bool:
    return all(_is_int(value) and value >= 0 for value in values)


@dataclass(slots=True, init=False)
class SamplingParams:
    """Sampling settings of one request.

    Fields (defaults as in vLLM):
        n: completions per prompt, each with noise of its own (seed, seed + 1, ...). Greedy ones would be equal: refused.
        temperature: >= 0. Below 1e-5 is greedy (argmax); values between are raised to 0.01.
        top_p: in (0, 1]. 1 is off.   top_k: 0 or -1 is off, else keep the k largest logits.   min_p: in [0, 1].
        presence_penalty, frequency_penalty: in [-2, 2], taken off the logits of tokens that are in the output, once, and once
            for each time.   repetition_penalty: > 0; logits of tokens in prompt or output are divided by it (multiplied if
            negative). 1 is off; from 0.01 to 100.
        logit_bias: {token id: what is added to its logit}, cut to [-100, 100].
        allowed_token_ids: only these can come.   bad_words: texts that cannot; of several tokens, the last is withheld where
            the output ends with the others.
        seed: the request's own noise. The same seed and the same logits give the same tokens, whatever the neighbours.
        stop: string or list of strings; the text ends before the first match (include_stop_str_in_output: after it).
        stop_token_ids: token ids that end the output (kept in token_ids, not in text).
        ignore_eos: the model's end tokens do not end the output.
        max_tokens: at most this many output tokens; None is up to max_model_len.   min_tokens: end tokens are masked before.
        logprobs: number of top log-probabilities to return per token (0 is the sampled token's alone); None is off.
        prompt_logprobs: the same for the prompt's tokens, whose first has none.
        skip_special_tokens: special tokens of the output are not text.
        truncate_prompt_tokens: keep the last so many tokens of the prompt; -1 is as many as leave room for max_tokens.

    bad_words_token_ids: the spellings of bad_words, which the front end fills in: the worker knows no text.
    Raises ValueError naming the field, its value and the limit; also for a vLLM field that is not supported.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] = field(default_factory=list)
    bad_words: list[str] = field(default_factory=list)
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    bad_words_token_ids: list[list[int]] = field(default_factory=list, init=False)

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
        *,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        allowed_token_ids: list[int] | None = None,
        bad_words: list[str] | None = None,
        include_stop_str_in_output: bool = False,
        prompt_logprobs: int | None = None,
        skip_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        **unsupported: Any,
    ) -> None:
        for name, value in unsupported.items():
            self._refuse(name, value)
        self.n = n
        self.temperature = temperature
        self.top_p = top_p
        self.top_k = top_k
        self.min_p = min_p
        self.presence_penalty = presence_penalty
        self.frequency_penalty = frequency_penalty
        self.repetition_penalty = repetition_penalty
        self.logit_bias = _as_bias(logit_bias)
        if allowed_token_ids is not None and not allowed_token_ids:  # as in vLLM: [] would allow nothing, so it is a mistake
            raise ValueError("SamplingParams.allowed_token_ids must be None or hold at least one token id, got [].")
        self.allowed_token_ids = _as_list("allowed_token_ids", allowed_token_ids)
        self.bad_words = _as_list("bad_words", bad_words)
        self.seed = None if seed == -1 else seed
        self.stop = [stop] if isinstance(stop, str) else _as_list("stop", stop)
        self.stop_token_ids = _as_list("stop_token_ids", stop_token_ids)
        self.include_stop_str_in_output = include_stop_str_in_output
        self.ignore_eos = ignore_eos
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.logprobs = logprobs
        self.prompt_logprobs = prompt_logprobs
        self.skip_special_tokens = skip_special_tokens
        self.truncate_prompt_tokens = truncate_prompt_tokens
        self.bad_words_token_ids = []
        self._validate()
        if self.is_greedy:  # as in vLLM: nothing to filter when the answer is the argmax
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        elif self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE

    @staticmethod
    def _refuse(name: str, value: Any) -> None:
        known = [f.name for f in fields(SamplingParams) if f.init] + list(_UNSUPPORTED)
        if name not in _UNSUPPORTED:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"SamplingParams has no field {name!r}.{hint}")
        default = _UNSUPPORTED[name]
        empty = value is None or (isinstance(value, (list, dict)) and not value)
        if not (empty or value == default):
            raise ValueError(f"SamplingParams.{name}={value!r} is not supported by minivllm; leave it at {default!r}.")

    def _validate(self) -> None:
        for name in _INTEGERS:  # they go to another process, to counters and into tensors, all of 64 bits
            value = getattr(self, name)
            self._need(not _is_int(value) or -(2**63) <= value < 2**63, name, "a 64-bit integer")
        self._validate_choice()
        self._validate_end()
        self._validate_output()

    def _need(self, ok: bool, name: str, rule: str) -> None:
        if not ok:
            raise ValueError(f"SamplingParams.{name} must be {rule}, got {getattr(self, name)!r}.")

    def _validate_choice(self) -> None:
        """What decides which token comes."""
        need = self._need
        need(_is_int(self.n) and self.n >= 1, "n", "an integer of at least 1")
        need(_is_real(self.temperature) and self.temperature >= 0, "temperature", "a finite number of at least 0")
        need(
            self.n == 1 or not self.is_greedy,
            "n",
            f"1 with temperature={self.temperature}: greedy completions are all the same (or raise the temperature)",
        )
        need(_is_real(self.top_p) and 0 < self.top_p <= 1, "top_p", "in (0, 1] (1 is off)")
        need(_is_int(self.top_k) and self.top_k >= -1, "top_k", "0 or -1 (off) or a positive integer")
        need(_is_real(self.min_p) and 0 <= self.min_p <= 1, "min_p", "in [0, 1] (0 is off)")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            need(_is_real(value) and -2 <= value <= 2, name, "in [-2, 2] (0 is off)")
        low, high = REPETITION_PENALTIES
        ok = _is_real(self.repetition_penalty) and low <= self.repetition_penalty <= high
        need(ok, "repetition_penalty", f"in [{low}, {high:g}] (1 is off)")
        need(_are_token_ids(self.allowed_token_ids), "allowed_token_ids", "a list of token ids (integers, at least 0)")
        need(all(isinstance(s, str) and s.strip() for s in self.bad_words), "bad_words", "made of texts that are not blank")
        need(self.seed is None or _is_int(self.seed), "seed", "None or a 64-bit integer")
        need(
            self.seed is None or self.seed + self.n <= 2**63,
            "seed",
            f"at most {2**63 - self.n} with n={self.n} (completion i has the seed plus i)",
        )

    def _validate_end(self) -> None:
        """What decides where the output ends."""
        need = self._need
        need(all(isinstance(s, str) and s for s in self.stop), "stop", "made of non-empty strings")
        need(_are_token_ids(self.stop_token_ids), "stop_token_ids", "a list of token ids (integers, at least 0)")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            need(isinstance(getattr(self, name), bool), name, "True or False")
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

    def _validate_output(self) -> None:
        """What is told of it, and of the prompt."""
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            ok = value is None or (_is_int(value) and 0 <= value <= MAX_LOGPROBS)
            self._need(ok, name, f"None or an integer from 0 to {MAX_LOGPROBS}")
        keep = self.truncate_prompt_tokens
        ok = keep is None or (_is_int(keep) and (keep == -1 or keep >= 1))
        self._need(ok, "truncate_prompt_tokens", "None, -1 (as many as fit) or an integer of at least 1")

    def replaced(self, **changes: Any) -> SamplingParams:
        """A copy with other values in some fields, made anew, so that every value is checked."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        values["allowed_token_ids"] = values["allowed_token_ids"] or None
        return SamplingParams(**values | changes)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPS

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def _as_list(name: str, value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    raise ValueError(f"SamplingParams.{name} must be a list, got {value!r}.")


def _as_bias(value: Any) -> dict[int, float]:
    """JSON has no integer keys: "50256" is token 50256, as in OpenAI's API."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"SamplingParams.logit_bias must be a dict of token id and number, got {value!r:.80}.")
    bias: dict[int, float] = {}
    for key, number in value.items():
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        if not _is_int(token_id) or token_id < 0:
            raise ValueError(f"SamplingParams.logit_bias must have token ids (integers, at least 0) as keys, got {key!r:.80}.")
        if not _is_real(number):
            raise ValueError(f"SamplingParams.logit_bias must have finite numbers as values, got {number!r:.80} for {key}.")
        bias[token_id] = min(MAX_BIAS, max(-MAX_BIAS, float(number)))
    return bias
