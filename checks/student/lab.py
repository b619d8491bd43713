"""start("02"), a lab's first cell: what this machine is, what is used, and whose parts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from checks.sandbox.sandbox import warm_up
from checks.student.engine import components, in_use
from checks.student.home import read_progress
from checks.student.memory import let_go_when_memory_is_full
from minivllm.components import SEAMS

if TYPE_CHECKING:
    import torch

    from minivllm.models.decoder import Decoder
    from minivllm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Lab:
    """What a lab's cells need to know. `fast` is MINIVLLM_FAST=1: experiments shrink to seconds."""

    number: str
    device: str
    dtype: torch.dtype
    model: str
    fast: bool

    def load_decoder(self) -> Decoder:
        """The model's decoder. Loaded once a kernel: running the cell again gives the same one, and takes no memory twice."""
        return _decoder(self.model, self.dtype, self.device)

    def load_tokenizer(self) -> Tokenizer:
        return _tokenizer(self.model)


def start(lab: str, model: str | None = None) -> Lab:
    """Say device, dtype, model and whose components; fetch the model if it is not here yet. `model` is any name minivllm takes
    (`$MINIVLLM_MODEL`, else smollm2-135m)."""
    from minivllm.models.hub import resolve_model
    from minivllm.worker.device import choose_device, choose_dtype, limit_threads

    warm_up()
    let_go_when_memory_is_full()
    number = lab.zfill(2)
    limit_threads()
    device = choose_device("auto")
    dtype = choose_dtype("auto", device)
    name = model or os.environ.get("MINIVLLM_MODEL") or "smollm2-135m"
    resolve_model(name)
    fast = os.environ.get("MINIVLLM_FAST", "0") not in ("", "0")
    print(f"Lab {number}")
    print(f"  device      {_device_name(device.type)}")
    print(f"  dtype       {str(dtype).removeprefix('torch.')} (the faster one here)")
    print(f"  model       {name}")
    print(f"  components  {whose()}")
    if fast:
        print("  experiments are shrunk (MINIVLLM_FAST is set)")
    return Lab(number, device.type, dtype, name, fast)


def _device_name(device: str) -> str:
    import torch

    if device == "cuda":
        return f"cuda ({torch.cuda.get_device_name()})"
    threads = torch.get_num_threads()
    return f"cpu, {threads} thread{'s' if threads > 1 else ''} (no NVIDIA GPU found; none is needed here)"


def whose() -> str:
    """One line: which components are the student's, from which exercises."""
    mine, state, used = components(), read_progress()["use"], in_use()
    told = []
    for seam in SEAMS:
        ids = sorted(used.get(seam, ()))
        if seam in mine and ids:
            told.append(f"{seam} is yours ({', '.join(ids)})")
        elif state.get(seam) == "reference":
            told.append(f"{seam} is minivllm's, as you asked")
    return "; ".join([*told, "the rest is minivllm's"]) if told else "all minivllm's; yours replace them as exercises pass"


@lru_cache(maxsize=1)
def _decoder(model: str, dtype: Any, device: str) -> Decoder:
    from minivllm.models.weights import load_model

    return load_model(model, dtype=dtype, device=device)


@lru_cache(maxsize=1)
def _tokenizer(model: str) -> Tokenizer:
    from minivllm.models.hub import resolve_model
    from minivllm.text.tokenizer import Tokenizer

    return Tokenizer.from_folder(resolve_model(model))
