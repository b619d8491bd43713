"""Lab 01, beside the student's code: runs in the child. lab_01.py judges what comes back.

Exercise 1.3 builds on 1.1 and 1.2. So that it is checked by itself, the cell is given minivllm's `apply_rope` and
`causal_attention` under these names; in the notebook the student's own stand there.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from checks.exercises import Case
from minivllm.attention.naive import causal_attention
from minivllm.models.decoder import LayerWeights
from minivllm.models.layers import rms_norm
from minivllm.models.rope import apply_rope

GIVEN = {"rms_norm": rms_norm, "apply_rope": apply_rope, "causal_attention": causal_attention}


def run_rope(module: ModuleType, case: Case) -> dict[str, Any]:
    x, positions = case["x"].clone(), case["positions"].clone()
    returned = module.apply_rope(x, positions, case["theta"])
    return {"returned": returned, "x": x, "positions": positions}


def run_attention(module: ModuleType, case: Case) -> dict[str, Any]:
    q, k, v = (case[name].clone() for name in "qkv")
    returned = module.causal_attention(q, k, v, **case["options"])
    return {"returned": returned, "q": q, "k": k, "v": v}


def run_layer(module: ModuleType, case: Case) -> dict[str, Any]:
    for name, function in GIVEN.items():
        vars(module).setdefault(name, function)
    x, positions = case["x"].clone(), case["positions"].clone()
    weights = LayerWeights(**{name: tensor.clone() for name, tensor in case["tensors"].items()}, **case["numbers"])
    returned = module.decoder_layer(x, weights, positions)
    return {"returned": returned, "x": x, "positions": positions}


RUN = {"1.1": run_rope, "1.2": run_attention, "1.3": run_layer}
