"""Lab 03, beside the student's code: runs in the child, and knows no answer. lab_03.py judges what comes back."""

from __future__ import annotations

import contextlib
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from checks.exercises import Case
from checks.exercises.lab_02_run import describe, tensors_in

# ------------------------------------------------------------------------------------------------ 3.1 ContiguousKVCache


def numbered(layer: int, first: int, count: int, heads: int, dim: int, value: bool) -> torch.Tensor:
    """Keys, or values, [count, heads, dim] whose numbers say where they belong: layer 1's token 7 is 207.00, 207.01, ... as a
    key, and the negative of it as a value. Not contiguous, as a decoder's are not."""
    tokens = 100.0 * (layer + 1) + torch.arange(first, first + count)
    inner = torch.arange(heads * dim).view(heads, dim) / 100
    whole = torch.stack([tokens[:, None, None] + inner] * 2, dim=1)
    return -whole[:, 1] if value else whole[:, 0]


def run_cache(module: ModuleType, case: Case) -> dict[str, Any]:
    """A script of calls: ["append", layer, first token, count] and ["view", layer]."""
    heads, dim = case["heads"], case["dim"]
    cache = module.ContiguousKVCache(case["layers"], case["max_len"], heads, dim)
    trace: list[Any] = []
    views: list[Any] = []  # kept, so that no address is used twice
    for name, layer, *rest in case["script"]:
        if name == "append":
            k, v = (numbered(layer, rest[0], rest[1], heads, dim, value) for value in (False, True))
            trace.append(_append(cache, layer, k, v, case["max_len"], case["layers"]))
        else:
            trace.append(_view(cache, layer, views))
    return {"trace": trace}


def _append(cache: Any, layer: int, k: torch.Tensor, v: torch.Tensor, max_len: int, num_layers: int) -> Any:
    before = _memory(cache, num_layers)
    try:
        return {"returned": cache.append(layer, k, v)}
    except Exception as error:
        if not isinstance(error, ValueError) and len(cache.view(layer)[0]) + len(k) <= max_len:
            raise  # not about room: the machine shows its line
        after = _memory(cache, num_layers)
        wrote = any(address in after and after[address] != held for address, held in before.items())
        return {"error": [type(error).__name__, str(error)[:300]], "wrote": wrote}


def _memory(cache: Any, num_layers: int) -> dict[int, bytes]:
    """The whole memory behind the views, by address: also what is reserved and not counted yet."""
    held: dict[int, bytes] = {}
    for layer in range(num_layers):
        with contextlib.suppress(Exception):  # a cache that cannot be viewed, or a layer that is not there: other words say so
            for x in cache.view(layer):
                storage = x.untyped_storage()
                held[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()
    return held


def _view(cache: Any, layer: int, views: list[Any]) -> Any:
    """What view returns, and where the memory of it lies."""
    returned = cache.view(layer)
    if not isinstance(returned, (tuple, list)) or not all(isinstance(x, torch.Tensor) for x in returned):
        return {"returned": returned}
    views.append(returned)
    memory = [x.untyped_storage().data_ptr() for x in returned]
    return {"returned": [x.clone() for x in returned], "memory": memory}  # as it is now: a later append may write over it


# ---------------------------------------------------------------------------------------------- 3.2 generate_with_cache


class ToyCache:
    """Stands for a cache of every layer. The toy model writes to it; the student only hands it on."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []

    @property
    def lengths(self) -> list[int]:
        """As 3.1's cache has them, of one layer: whoever asks here counts right."""
        return [len(self.tokens)]


class ToyCachedModel:
    """model(token_ids, positions, cache) -> logits [T, V]: row t depends on all that is in the cache, then on the call's tokens
    0..t, and on the positions they came with. `calls` remembers both. Each row has one largest logit, 0.0."""

    def __init__(self, vocab_size: int, salt: int, max_calls: int) -> None:
        self.vocab_size, self.salt, self.max_calls = vocab_size, salt, max_calls
        self.calls: list[list[list[int]]] = []

    def __call__(self, token_ids: Any, positions: Any, cache: Any) -> torch.Tensor:
        _must_be_ids("token_ids", token_ids)
        _must_be_ids("positions", positions)
        if not isinstance(cache, ToyCache):
            raise TypeError(f"model(token_ids, positions, cache) takes the cache you were given, and got {describe(cache)}")
        if len(token_ids) != len(positions):
            raise ValueError(f"{len(token_ids)} token ids came with {len(positions)} positions: each token has one")
        if len(token_ids) == 0:
            raise ValueError("model(token_ids, positions, cache) was called with no tokens at all")
        if len(self.calls) >= self.max_calls:
            raise RuntimeError(f"the model was called {self.max_calls + 1} times: does the loop end after max_new_tokens?")
        self.calls.append([token_ids.tolist(), positions.tolist()])
        cache.tokens += token_ids.tolist()
        cache.positions += positions.tolist()
        best = favourites(cache.tokens, cache.positions, self.vocab_size, self.salt)[-len(token_ids) :]
        return -((torch.arange(self.vocab_size) - torch.tensor(best)[:, None]) % self.vocab_size).float()


def favourites(tokens: list[int], positions: list[int], vocab_size: int, salt: int) -> list[int]:
    """The toy model's favourite after each of the tokens it has seen, at their positions."""
    found, state = [], salt
    for token, position in zip(tokens, positions, strict=True):
        state = (state * 31 + token * 7 + position + 1) % 1009
        found.append(state % vocab_size)
    return found


def _must_be_ids(name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.dtype != torch.int64:
        raise TypeError(f"model: {name} must be a 1-D tensor of int64, and is {describe(value)}")


def run_generate(module: ModuleType, case: Case) -> dict[str, Any]:
    model = ToyCachedModel(case["vocab_size"], case["salt"], max_calls=case["max_new_tokens"] + len(case["prompt"]) + 20)
    prompt, cache = list(case["prompt"]), ToyCache()
    returned = module.generate_with_cache(model, prompt, case["max_new_tokens"], cache)
    return {"returned": returned, "tensors": tensors_in(returned), "calls": model.calls, "prompt": prompt}


# --------------------------------------------------------------------------------------------- 3.3 left_pad, 3.4 memory


def run_left_pad(module: ModuleType, case: Case) -> dict[str, Any]:
    prompts = [list(prompt) for prompt in case["prompts"]]
    return {"returned": module.left_pad(prompts), "prompts": prompts}


def run_memory(module: ModuleType, case: Case) -> Any:
    if case["function"] == "kv_bytes_per_token":
        return module.kv_bytes_per_token(SimpleNamespace(**case["config"]), case["dtype_bytes"])
    return module.max_concurrency(case["memory_bytes"], case["max_model_len"], case["bytes_per_token"])


RUN = {"3.1": run_cache, "3.2": run_generate, "3.3": run_left_pad, "3.4": run_memory}
