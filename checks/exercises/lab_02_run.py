"""Lab 02, beside the student's code: runs in the child, and knows no answer. lab_02.py judges what comes back."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from checks.exercises import Case


class ToyModel:
    """A language model small enough to follow: logits [T, V] for token ids [T], row t depending on tokens 0..t and on nothing
    else.

    `calls` remembers the token ids of each call. Each row has one largest logit, 0.0, and no two equal ones.
    """

    def __init__(self, vocab_size: int, salt: int, max_calls: int) -> None:
        self.vocab_size, self.salt, self.max_calls = vocab_size, salt, max_calls
        self.calls: list[list[int]] = []

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        if not isinstance(token_ids, torch.Tensor) or token_ids.dim() != 1 or token_ids.dtype != torch.int64:
            raise TypeError(f"model(token_ids) takes a 1-D tensor of int64 token ids, and was given {describe(token_ids)}")
        if len(token_ids) == 0:
            raise ValueError("model(token_ids) was called with no tokens at all")
        if len(self.calls) >= self.max_calls:
            raise RuntimeError(f"the model was called {self.max_calls + 1} times: does the loop end after max_new_tokens?")
        self.calls.append(token_ids.tolist())
        best = torch.tensor(best_next_tokens(token_ids.tolist(), self.vocab_size, self.salt))
        return -((torch.arange(self.vocab_size) - best[:, None]) % self.vocab_size).float()


def best_next_tokens(token_ids: list[int], vocab_size: int, salt: int) -> list[int]:
    """The toy model's favourite after each prefix of `token_ids`."""
    favourites, state = [], salt
    for token in token_ids:
        state = (state * 31 + token + 1) % 1009
        favourites.append(state % vocab_size)
    return favourites


def describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    return "None" if value is None else f"a {type(value).__name__}"


def run_generate(module: ModuleType, case: Case) -> dict[str, Any]:
    model = ToyModel(case["vocab_size"], case["salt"], max_calls=case["max_new_tokens"] + 20)
    prompt = list(case["prompt"])
    returned = module.greedy_generate(model, prompt, case["max_new_tokens"])
    tensors = tensors_in(returned)
    return {"returned": returned, "tensors": tensors, "calls": model.calls, "prompt": prompt}


def tensors_in(returned: Any) -> str:
    """Whether tokens came as tensors: "whole", "each", or neither."""
    if isinstance(returned, torch.Tensor):
        return "whole" if returned.dim() == 1 and not returned.is_floating_point() else ""
    items = returned if isinstance(returned, (list, tuple)) else ()
    return "each" if any(isinstance(t, torch.Tensor) and t.numel() == 1 for t in items) else ""


def run_logits(module: ModuleType, case: Case) -> dict[str, Any]:
    """Exercises 2.2 and 2.3: one of the functions, on logits [B, V] and one setting a row."""
    logits = torch.tensor(case["logits"])
    setting = torch.tensor(case["setting"])
    returned = getattr(module, case["function"])(logits, setting)
    return {"returned": returned, "logits": logits, "setting": setting}


RUN = {"2.1": run_generate, "2.2": run_logits, "2.3": run_logits}
