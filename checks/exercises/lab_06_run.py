"""Lab 06, beside the student's code: runs in the child, and knows no answer. lab_06.py judges what comes back."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from checks.exercises import Case
from checks.exercises.lab_05_run import new_request, new_scheduler, run_steps
from minivllm.worker.input_batch import slot_mapping


def run_new_tokens(module: ModuleType, case: Case) -> dict[str, Any]:
    """One request among `num_requests`, in a scheduler with these limits."""
    scheduler = new_scheduler(module, {})
    scheduler.long_prefill_token_threshold = case["threshold"]
    scheduler.max_model_len = case["max_model_len"]
    scheduler.chunked_prefill = case["chunked"]
    request = new_request("A", case["tokens"] - case["outputs"], 100)
    request.all_token_ids += [5] * case["outputs"]
    request.num_computed_tokens = case["computed"]
    request.spec_token_ids = [7] * case["drafts"]
    request.num_output_placeholders = case["placeholders"]
    scheduler.requests = {str(i): request for i in range(case["num_requests"])}
    before = request.num_computed_tokens, request.num_tokens_with_spec
    returned = scheduler.num_new_tokens(request, case["budget"], case["cached"])
    return {
        "own": "num_new_tokens" in vars(module.Scheduler),
        "returned": returned,
        "changed": before != (request.num_computed_tokens, request.num_tokens_with_spec),
    }


NAMES = ("query_start_loc", "seq_lens", "positions", "slots")


def run_metadata(module: ModuleType, case: Case) -> dict[str, Any]:
    inputs: list[np.ndarray] = [np.array(case[name], dtype=np.int64) for name in ("computed", "scheduled")]
    inputs.append(np.array(case["block_tables"], dtype=np.int32).reshape(len(case["computed"]), -1))
    before = [array.copy() for array in inputs]
    returned = module.build_metadata(*inputs, case["block_size"], slot_mapping)
    names = ("num_computed_tokens", "num_scheduled_tokens", "block_tables")
    changed = [name for name, was, now in zip(names, before, inputs, strict=True) if not np.array_equal(was, now)]
    if not isinstance(returned, (tuple, list)) or len(returned) != len(NAMES):
        kind = type(returned).__name__
        shown = (
            f"a {kind} of {len(returned)}" if isinstance(returned, (tuple, list)) else None if returned is None else f"a {kind}"
        )
        return {"returned": shown, "changed": changed}
    arrays = {}
    for name, array in zip(NAMES, returned, strict=True):
        is_array = isinstance(array, np.ndarray)
        arrays[name] = [array.dtype.kind, list(array.shape), array.tolist()] if is_array else type(array).__name__
    return {"arrays": arrays, "changed": changed}


RUN = {"6.1": run_new_tokens, "6.2": run_steps, "6.3": run_metadata}
