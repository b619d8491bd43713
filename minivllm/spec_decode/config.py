"""SpeculativeConfig: how drafts are made, vLLM's names. Pure Python."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METHODS = ("ngram", "draft_model", "eagle")
_DEFAULT_LOOKUP = 5, 2  # longest, shortest
# Names that vLLM's speculative_config takes and this engine does not serve, with the values that change nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "draft_tensor_parallel_size": (None, 1),
    "quantization": (None,),
    "max_model_len": (None,),
    "revision": (None,),
    "code_revision": (None,),
    "disable_by_batch_size": (None,),
    "disable_padded_drafter_batch": (False,),
    "parallel_drafting": (False,),
    "speculative_token_tree": (None,),
    "enforce_eager": (None, True),
    "draft_load_config": (None,),
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """`speculative_config={...}` of LLM, checked. Raises ValueError naming the key, its value, and what to change.

    method: "ngram" (what followed these tokens before; no model), "draft_model" (a smaller model with the same vocabulary), or
        "eagle" (a head trained on the target's hidden states).
    num_speculative_tokens: drafts for each request and step. A step that accepts all yields one token more.
    model: of "draft_model", as LLM's `model`; of "eagle", the head's folder (None: the one that ships with minivllm, for
        smollm2-135m).
    prompt_lookup_max, prompt_lookup_min: of "ngram", the longest and shortest run of tokens that counts as seen before.
    """

    method: str
    num_speculative_tokens: int
    model: str | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> SpeculativeConfig:
        if not isinstance(given, Mapping):
            raise ValueError(f"speculative_config must be a dict such as {_EXAMPLE}, got {given!r}.")
        names = [f.name for f in dataclasses.fields(cls)]
        own = {}
        for name, value in given.items():
            if name in names:
                own[name] = value
            elif name in _UNSUPPORTED:
                if value not in _UNSUPPORTED[name]:
                    raise ValueError(f"speculative_config: {name}={value!r} is not supported by minivllm. Leave it out.")
            else:
                close = difflib.get_close_matches(str(name), [*names, *_UNSUPPORTED], n=1)
                hint = f" Did you mean {close[0]!r}?" if close else f" It has {', '.join(names)}."
                raise ValueError(f"speculative_config has no setting {name!r}.{hint}")
        for name in ("method", "num_speculative_tokens"):
            if name not in own:
                raise ValueError(f"speculative_config needs {name!r}, as in {_EXAMPLE}.")
        return cls(**own)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"speculative_config: method={self.method!r} is not one of {', '.join(map(repr, METHODS))}.")
        self._need_positive("num_speculative_tokens", self.num_speculative_tokens)
        if self.model is not None and (not isinstance(self.model, str) or not self.model):
            raise ValueError(f"speculative_config: model must be a name or a path, got {self.model!r}.")
        if self.method == "ngram":
            if self.model is not None:
                raise ValueError(f"speculative_config: method='ngram' needs no model; leave model={self.model!r} out.")
            self._settle_lookup()
            return
        if self.method == "draft_model" and self.model is None:
            raise ValueError("speculative_config: method='draft_model' needs model, a smaller model with the same vocabulary.")
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            if getattr(self, name) is not None:
                raise ValueError(f"speculative_config: {name} is of method='ngram'; leave it out for method={self.method!r}.")

    def _settle_lookup(self) -> None:
        longest, shortest = self.prompt_lookup_max, self.prompt_lookup_min
        for name, value in (("prompt_lookup_max", longest), ("prompt_lookup_min", shortest)):
            if value is not None:
                self._need_positive(name, value)
        if longest is None:
            longest = max(_DEFAULT_LOOKUP[0], shortest or 0)
        if shortest is None:
            shortest = min(_DEFAULT_LOOKUP[1], longest)
        if shortest > longest:
            raise ValueError(
                f"speculative_config: prompt_lookup_min={shortest} is larger than prompt_lookup_max={longest}. Lower it."
            )
        object.__setattr__(self, "prompt_lookup_max", longest)
        object.__setattr__(self, "prompt_lookup_min", shortest)

    @staticmethod
    def _need_positive(name: str, value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"speculative_config: {name} must be an integer of at least 1, got {value!r}.")

    @property
    def num_lookahead_tokens(self) -> int:
        """KV slots a drafter with a cache writes beyond a step's own tokens."""
        return 0 if self.method == "ngram" else self.num_speculative_tokens

    @property
    def use_eagle(self) -> bool:
        return self.method == "eagle"


_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 3}'
