"""SpecDecodeStats: what drafts were worth. Counted by the model runner; shown by `minivllm bench spec` and Lab 10. Pure
Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class SpecDecodeStats:
    """Counts since the start, or since `reset`. A *verification* is one request in one step that had drafts.

    drafted, accepted [k]: how many drafts stood at each position, and how many of them (and so all before them) were right.
    num_tokens: tokens the verifications yielded, each one's own token included.
    draft_s, target_s: seconds spent drafting, and in the target's forward passes and sampling of steps that verified drafts.
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    num_verifications: int = 0
    num_tokens: int = 0
    draft_s: float = 0.0
    target_s: float = 0.0

    def count(self, num_drafts: Sequence[int], num_tokens: Sequence[int]) -> None:
        """Take in a step's verifications: how many drafts each had, and how many tokens it yielded (accepted drafts + 1)."""
        for drafts, tokens in zip(num_drafts, num_tokens, strict=True):
            self.drafted += [0] * (drafts - len(self.drafted))
            self.accepted += [0] * (drafts - len(self.accepted))
            for position in range(drafts):
                self.drafted[position] += 1
                self.accepted[position] += position < tokens - 1
            self.num_verifications += 1
            self.num_tokens += tokens

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    @property
    def acceptance(self) -> list[float]:
        """The share of drafts at each position that were right, together with all before them."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def tokens_per_step(self) -> float:
        """Tokens a verification yields on average: 1 without a single right draft, k + 1 at most. 0 before the first."""
        return self.num_tokens / self.num_verifications if self.num_verifications else 0.0

    def describe(self) -> str:
        """The numbers in one line."""
        by_position = " ".join(f"{share:.0%}" for share in self.acceptance) or "none"
        return (
            f"{self.num_verifications} verifications, {self.tokens_per_step:.2f} tokens each;"
            f" accepted by position: {by_position}; drafting {self.draft_s:.2f} s, verifying {self.target_s:.2f} s"
        )
