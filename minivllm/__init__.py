"""minivllm: a mini LLM inference engine with vLLM V1's design and names, built step by step in `labs/`.

    from minivllm import LLM, SamplingParams

Importing the package costs no torch import: names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "LLM": "minivllm.llm",
    "SamplingParams": "minivllm.sampling_params",
    "EngineConfig": "minivllm.config",
    "Components": "minivllm.components",
    "RequestOutput": "minivllm.outputs",
    "CompletionOutput": "minivllm.outputs",
}
__all__ = ["LLM", "CompletionOutput", "Components", "EngineConfig", "RequestOutput", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from minivllm.components import Components
    from minivllm.config import EngineConfig
    from minivllm.llm import LLM
    from minivllm.outputs import CompletionOutput, RequestOutput
    from minivllm.sampling_params import SamplingParams


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'minivllm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
