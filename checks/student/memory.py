"""A cell that runs out of memory must not take the next one along. Called by `start`.

The last error of a notebook is kept, for its traceback; a traceback keeps every function's variables, and those are the tensors
that did not fit. So they are let go here, once the error is shown, and what to lower is said.
"""

from __future__ import annotations

import sys
import traceback
from types import TracebackType
from typing import Any

from checks.student.notebook import current_shell

ADVICE = (
    "The memory was full. What the functions of this cell held is let go, so the next cell can run. If it happens again,\n"
    "lower the number of tokens or requests (max_num_batched_tokens, max_num_seqs), then gpu_memory_utilization, or take a\n"
    "smaller model. Tensors that have names in the notebook stay: `del name`, or restart the kernel."
)


def let_go_when_memory_is_full() -> None:
    """From now on, in this kernel. Nothing to do outside of one."""
    shell = current_shell()
    if shell is not None and hasattr(shell, "set_custom_exc"):
        import torch

        shell.set_custom_exc((torch.OutOfMemoryError, MemoryError), _show_and_let_go)


def _show_and_let_go(
    shell: Any, kind: type[BaseException], error: BaseException, tb: TracebackType | None, tb_offset: int | None = None
) -> None:
    shell.showtraceback((kind, error, tb), tb_offset=tb_offset)
    print(ADVICE, file=sys.stderr)
    seen: BaseException | None = error
    while seen is not None:  # and the errors it was raised from
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
