"""Attention backends: `interface.py` says what one is, `get_backend` finds it by name, `replace_parts` puts a student's
functions into it. Importing this costs no torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minivllm.components import Components

if TYPE_CHECKING:
    import torch

    from minivllm.attention.interface import AttentionBackend
    from minivllm.models.registry import ModelConfig

logger = logging.getLogger("minivllm")


def get_backend(name: str, device_type: str, dtype: torch.dtype) -> AttentionBackend:
    """The backend `name` ("auto", "naive", "reference", "cpu", "triton") for a model of `dtype` on `device_type`.

    "auto" is the fastest there is for the device. Raises ValueError for a name that does not exist or does not run there.
    """
    if name == "auto":
        if device_type != "cpu":
            return _fastest_on_gpu(device_type, dtype)
        name = "cpu"
    if name == "naive":
        from minivllm.attention.naive import NAIVE

        return NAIVE
    if name == "reference":
        from minivllm.attention.reference import REFERENCE

        return REFERENCE
    if name == "cpu":
        if device_type != "cpu":
            raise ValueError(f"attention_backend='cpu' does not run on device {device_type!r}. Use 'auto'.")
        from minivllm.attention.cpu import cpu_backend

        return cpu_backend(dtype)
    if name == "triton":
        from minivllm.attention.gpu import triton_backend

        return triton_backend(device_type, dtype)
    raise ValueError(f"attention_backend={name!r} is not one of 'auto', 'naive', 'reference', 'cpu', 'triton'.")


def _fastest_on_gpu(device_type: str, dtype: torch.dtype) -> AttentionBackend:
    """The Triton kernels, or where they do not run, what PyTorch has."""
    from minivllm.attention.gpu import TRITON, has_tensor_cores_for_triton, why_not
    from minivllm.attention.reference import REFERENCE
    from minivllm.attention.sdpa import paged_prefill

    reason = why_not(device_type, dtype)
    if reason is None:
        if has_tensor_cores_for_triton():
            return TRITON
        return dataclasses.replace(TRITON, name="triton, fused prefill", prefill=paged_prefill)

    logger.warning("Attention takes the slow PyTorch way: attention_backend='triton' %s", reason)
    return dataclasses.replace(REFERENCE, name="reference, fused prefill", prefill=paged_prefill)


def replace_parts(
    backend: AttentionBackend, components: Components, model: ModelConfig, device_type: str, dtype: torch.dtype
) -> AttentionBackend:
    """The backend with the replaced write_kv, attention.decode and attention.prefill in place of its own. Raises ValueError if
    the model needs a sliding window and a part has none, or if a part is Triton kernels that do not run in `dtype` here."""
    _refuse_kernels_that_do_not_run(components, device_type, dtype)
    windows = {window for window in model.sliding_window if window is not None}
    parts: dict[str, Any] = {}
    if "write_kv" in components:
        parts["write_kv"] = components["write_kv"]
    for field, seam in (("decode", "attention.decode"), ("prefill", "attention.prefill")):
        if seam not in components:
            continue
        part = components[seam]
        if windows:
            components.require(seam, "sliding window", f"A model with sliding_window={min(windows)}")
            if "sliding_window" not in _keywords(part):
                raise ValueError(
                    f"A model with sliding_window={min(windows)} needs an {seam} component that takes sliding_window=...;"
                    f" yours is {getattr(part, '__name__', part)}{inspect.signature(part)}."
                )
        parts[field] = _with_accepted_keywords(part)
    if not parts:
        return backend
    name = f"{backend.name} with replaced {', '.join(parts)}"
    # a part may make the host wait, or gather whole block tables, unless it says that it does not
    captured = [components[seam] for seam in ("write_kv", "attention.decode") if seam in components]
    parts["is_capturable"] = backend.is_capturable and all("graphs" in getattr(p, "capabilities", ()) for p in captured)
    return dataclasses.replace(backend, name=name, **parts)


def _refuse_kernels_that_do_not_run(components: Components, device_type: str, dtype: torch.dtype) -> None:
    from minivllm.attention.gpu import why_not

    for seam in ("write_kv", "attention.decode", "attention.prefill"):
        part = components.get(seam)
        if getattr(part, "__module__", "").endswith("triton_kernels") and (reason := why_not(device_type, dtype)):
            raise ValueError(f"Your {seam} component ({part.__module__}) {reason}")


def _keywords(part: Callable[..., Any]) -> set[str]:
    """Which of the optional arguments a part takes."""
    optional = {"scale", "sliding_window"}
    parameters = inspect.signature(part).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return optional
    return optional & parameters.keys()


def _with_accepted_keywords(part: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Call a part with the optional arguments its signature has. One without `scale` uses 1 / sqrt(head_dim), as every model
    here does; one without `sliding_window` is given to models without windows only."""
    accepted = _keywords(part)
    if accepted == {"scale", "sliding_window"}:
        return part

    def attend(*tensors: torch.Tensor, **optional: Any) -> torch.Tensor:
        return part(*tensors, **{name: value for name, value in optional.items() if name in accepted})

    return attend
