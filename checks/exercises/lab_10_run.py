"""Lab 10, beside the student's code: runs in the child, and knows no answer. lab_10.py judges what comes back."""

from __future__ import annotations

import math
import time
from types import ModuleType
from typing import Any

import numpy as np
import torch

from checks.exercises import Case

FEW = 500  # rows of the calls that come first: is the answer the same twice, and alone?
SECONDS = 0.3  # of a case: an answer that goes row by row draws less often
LEAST = 1_000

# ------------------------------------------------------------------------------------- 10.1 expected_tokens, expected_speedup


def run_gain(module: ModuleType, case: Case) -> Any:
    return plain_number(getattr(module, case["function"])(*case["arguments"]))


def plain_number(returned: Any) -> Any:
    """A tensor or an array of one number is that number."""
    is_tensor, is_array = isinstance(returned, torch.Tensor), isinstance(returned, np.ndarray)
    is_one = (is_tensor and returned.numel() == 1) or (is_array and returned.size == 1)
    return returned.item() if is_one else returned


# ----------------------------------------------------------------------------------------------- 10.2 NgramDrafter.propose


def run_propose(module: ModuleType, case: Case) -> list[dict[str, Any]]:
    """The sequences one after the other on one drafter, as requests of a batch come to it."""
    drafter = module.NgramDrafter(case["longest"], case["shortest"])
    outputs = []
    for tokens in case["sequences"]:
        token_ids = np.array(tokens, dtype=np.int32)
        returned = drafter.propose(token_ids, case["k"])
        if isinstance(returned, np.ndarray) and returned.ndim == 1:
            returned = returned.tolist()
        outputs.append({"returned": returned, "changed": token_ids.tolist() != tokens})
    return outputs


# -------------------------------------------------------------------------------------------------------- 10.3 verify_greedy


def run_verify(module: ModuleType, case: Case) -> dict[str, Any]:
    draft_ids = torch.tensor(case["draft_ids"], dtype=torch.int64)
    target_logits = torch.tensor(case["target_logits"])
    before = draft_ids.clone(), target_logits.clone()
    returned = module.verify_greedy(draft_ids, target_logits)
    changed = [
        name
        for name, now, then in zip(("draft_ids", "target_logits"), (draft_ids, target_logits), before, strict=True)
        if not torch.equal(now, then)
    ]
    return {"returned": returned, "changed": changed}


# ----------------------------------------------------------------------------------------------------- 10.4 rejection_sample

Inputs = dict[str, torch.Tensor]


def run_reject(module: ModuleType, case: Case) -> dict[str, Any]:
    inputs = given_inputs(case) if case["kind"] == "given" else drawn_inputs(case)
    if case["kind"] == "given":
        return _answered(module, inputs)
    few = {name: tensor[:FEW] for name, tensor in inputs.items()}
    first = _answered(module, few)
    if not isinstance(first["returned"], torch.Tensor) or first["returned"].shape != (FEW, case["k"] + 1):
        return first
    again = _answered(module, few)
    n = min(case["draws"], max(LEAST, int(SECONDS / _seconds_per_request(module, inputs))))
    output = _answered(module, {name: tensor[:n] for name, tensor in inputs.items()})
    returned = output["returned"]
    output["repeats"] = _same(first["returned"], again["returned"])
    output["alone"] = isinstance(returned, torch.Tensor) and _same(first["returned"], returned[:FEW])
    if isinstance(returned, torch.Tensor) and not returned.is_floating_point() and returned.numel():
        low, high = returned.min(), returned.max()
        if low >= -128 and high < 128:  # small numbers travel fast
            output["returned"], output["was"] = returned.to(torch.int8), str(returned.dtype)
    return output


def _seconds_per_request(module: ModuleType, inputs: Inputs) -> float:
    """Of LEAST requests at once: of a few, most of the time would be the call's own. The best of several calls counts: on a
    busy machine one may take ten times as long, and fewer draws find less."""
    some, times = {name: tensor[:LEAST] for name, tensor in inputs.items()}, [math.inf]
    while len(times) < 8 and sum(times[1:]) < SECONDS / 2:
        start = time.process_time()
        _answered(module, some)
        times.append(time.process_time() - start)
    return max(min(times) / LEAST, 1e-9)


def _same(one: Any, other: Any) -> bool:
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)


def _answered(module: ModuleType, inputs: Inputs) -> dict[str, Any]:
    given = {name: tensor.clone() for name, tensor in inputs.items()}
    returned = module.rejection_sample(*given.values())
    changed = [name for name, tensor in given.items() if not torch.equal(tensor, inputs[name])]
    dtype = str(returned.dtype) if isinstance(returned, torch.Tensor) else ""
    return {"returned": returned, "was": dtype, "changed": changed, "repeats": True, "alone": True}


def given_inputs(case: Case) -> Inputs:
    """Numbers that were written down."""
    return {
        "draft_ids": torch.tensor(case["draft_ids"], dtype=torch.int64),
        "draft_probs": torch.tensor(case["draft_probs"]),
        "target_probs": torch.tensor(case["target_probs"]),
        "noise": torch.tensor(case["noise"], dtype=torch.float64),
    }


def drawn_inputs(case: Case) -> Inputs:
    """Many requests with the same distributions, their drafts drawn from them.

    q [k, V] of the drafts; p [k + 1, V] of the target's rows, or, where `table` [V, V] is given, p of the first row and
    table[d] after a draft d.
    """
    draft_ids, generator = drawn_drafts(case), torch.Generator().manual_seed(case["noise_seed"] + 1)
    q, p, n = torch.tensor(case["q"]), torch.tensor(case["p"]), case["draws"]
    if case["table"] is None:
        target = p.expand(n, *p.shape)
    else:
        target = torch.cat([p[:1].expand(n, 1, -1), torch.tensor(case["table"])[draft_ids]], dim=1)
    return {
        "draft_ids": draft_ids,
        "draft_probs": q.expand(n, *q.shape),
        "target_probs": target,
        "noise": torch.rand(n, len(q) + 1, 2, generator=generator, dtype=torch.float64),
    }


def drawn_drafts(case: Case) -> torch.Tensor:
    """[draws, k], each column drawn from its q."""
    generator = torch.Generator().manual_seed(case["noise_seed"])
    rows = [torch.tensor(row) for row in case["q"]]
    return torch.stack([torch.multinomial(q, case["draws"], replacement=True, generator=generator) for q in rows], dim=1)


RUN = {"10.1": run_gain, "10.2": run_propose, "10.3": run_verify, "10.4": run_reject}
