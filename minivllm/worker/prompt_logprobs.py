"""PromptLogprobs: what the model says of each prompt token, gathered chunk by chunk until the prompt is whole. Labs: built by
none. May not know the scheduler or text.

The logits at position p are about the token at p + 1: so a chunk yields an entry for each of its tokens that has a prompt token
after it, and the first prompt token has none. A prompt of P tokens makes [P, V] logits, far more than a step's; they are made
a slice at a time, and only the top ones are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

from minivllm.core.step import TokenLogprobs
from minivllm.sampling.sampler import top_logprobs
from minivllm.worker.input_batch import InputBatch, StepInputs

SLICE = 64  # rows of logits made at once: 13 MB at 49,152 tokens, 33 at 128,256


class PromptLogprobs:
    """`compute_logits`: hidden states [N, H] -> logits [N, V]."""

    def __init__(self, compute_logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._compute_logits = compute_logits
        self._found: dict[str, list[TokenLogprobs]] = {}  # of the prompts that are not whole yet

    def add(self, inputs: StepInputs, batch: InputBatch, hidden: torch.Tensor) -> dict[str, list[TokenLogprobs]]:
        """Take in a step's hidden states [T, H]. Returns the entries of each prompt that this step ends."""
        whole: dict[str, list[TokenLogprobs]] = {}
        for b in (batch.num_prompt_logprobs[inputs.rows] >= 0).nonzero()[0]:
            req_id, row = inputs.req_ids[b], inputs.rows[b]
            num_prompt_tokens = int(batch.num_prompt_tokens[row])
            start, stop = int(inputs.token_starts[b]), int(inputs.token_starts[b + 1])
            position, last_position = inputs.positions[[start, stop - 1]].tolist()
            if position == 0:  # also when it begins again after a preemption
                self._found[req_id] = []
            stop = min(stop, start + num_prompt_tokens - 1 - position)
            targets = batch.token_ids[row, position + 1 : position + 1 + stop - start]
            self._found[req_id] += self._entries(hidden[start:stop], targets, int(batch.num_prompt_logprobs[row]))
            if last_position >= num_prompt_tokens - 1:
                whole[req_id] = self._found.pop(req_id)
                batch.num_prompt_logprobs[row] = -1
        return whole

    def forget(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            self._found.pop(req_id, None)

    def _entries(self, hidden: torch.Tensor, targets: np.ndarray, num_logprobs: int) -> list[TokenLogprobs]:
        entries: list[TokenLogprobs] = []
        for i in range(0, len(targets), SLICE):
            chosen = torch.from_numpy(targets[i : i + SLICE].astype(np.int64)).to(hidden.device)
            logprobs = self._compute_logits(hidden[i : i + len(chosen)]).float().log_softmax(dim=-1)
            found = top_logprobs(logprobs, chosen, num_logprobs)
            columns = (found.token_ids.tolist(), found.logprobs.tolist(), found.ranks.tolist())
            entries += [TokenLogprobs(*row) for row in zip(*columns, strict=True)]
        return entries
