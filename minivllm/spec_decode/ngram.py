"""Drafts without a model: what followed the last time these tokens were seen. Lab 10 builds `NgramDrafter.propose`. NumPy; may
not know the batch, the model or torch.

    tokens    ... the cat sat on the mat . then the cat sat      the longest suffix seen before: "the cat sat"
                              ^^^^^^^^^^                         drafts: what followed it

Text that repeats itself (code, tables, answers that quote their prompt) is guessed well and for nothing (prompt lookup
decoding, Saxena 2023).
"""

from __future__ import annotations

import numpy as np


class NgramDrafter:
    """prompt_lookup_max, prompt_lookup_min: the longest and shortest suffix that counts as seen before."""

    def __init__(self, prompt_lookup_max: int = 5, prompt_lookup_min: int = 2) -> None:
        self.prompt_lookup_max = prompt_lookup_max
        self.prompt_lookup_min = prompt_lookup_min

    def propose(self, token_ids: np.ndarray, k: int) -> list[int]:
        """k guesses at what follows token_ids [n], a request's prompt and output so far; [] without a match.

        Of all places where the longest suffix occurs before, the last one counts: a text resembles most what it has just said.
        Where that is less than k tokens ago, the copy runs on into its own output, as in LZ77: after "a b a b" comes "a b a".
        """
        n = len(token_ids)
        # ends[i]: a place whose last `length` tokens equal the sequence's. Few survive the first comparison, which is over all.
        ends = (token_ids[: n - 1] == token_ids[n - 1]).nonzero()[0] + 1 if n else np.zeros(0, dtype=np.int64)
        found, length = -1, 1
        while len(ends):
            if length >= self.prompt_lookup_min:
                found = int(ends[-1])
            if length == self.prompt_lookup_max:
                break
            length += 1
            ends = ends[ends >= length]
            ends = ends[token_ids[ends - length] == token_ids[n - length]]
        if found < 0:
            return []
        drafts: list[int] = token_ids[found : found + k].tolist()
        period = n - found
        while len(drafts) < k:
            drafts.append(drafts[len(drafts) - period])
        return drafts
