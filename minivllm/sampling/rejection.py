"""Verification: which drafts stay, and which token follows them. Lab 10 builds `verify_greedy` and `rejection_sample`. May not
know requests or drafters.

    drafts          d1      d2      d3                 k = 3
    target's rows   p(.|x)  p(.|x d1)  p(.|x d1 d2)  p(.|x d1 d2 d3)      k + 1 of them, from one forward pass
    answer          d1      d2      t                  two accepted, then the target's own token in d3's place

The answer must have the distribution of plain sampling from p, whatever the drafter q proposes. There are two ways.

**Rejection** (Leviathan et al. 2023; Chen et al. 2023): keep d with probability min(1, p(d) / q(d)), else draw from what p has
more than q, max(p - q, 0), normalized. Needed where a drafter draws from a q of its own.

**Coupling**, the engine's default: draw t ~ p with the row's own noise, and keep d exactly if t = d (`is_answer`). The engine's
drafters propose their one best guess: q is one-hot, so min(1, p(d) / q(d)) = p(d), which is how often t = d, and given that
t differs, t has the distribution of p without d: the same as rejection's residual. So both are exact, and accept equally often.
Coupling has two advantages: all settings of a request (penalties, masks, logprobs) work as they do without drafts, and as the
noise is keyed by (seed, position), equal logits give *the same tokens* with and without speculation, drafts right or wrong.
"""

from __future__ import annotations

import numpy as np
import torch

from minivllm.sampling.sampler import INVALID, Sampler, SamplerOutput, SamplingMetadata, change_logits, choose, uniform

_OTHER_NOISE = 0x5DEECE66D  # any constant: turns a seed into that of an independent stream


def is_answer(token_ids: np.ndarray, draft_ids: np.ndarray, ahead: np.ndarray) -> np.ndarray:
    """Which of a batch's sampled tokens are answers. All [N]; a request with k drafts has k + 1 neighbouring rows, `ahead`
    0..k.

    token_ids: sampled by the target after the drafts before the row.   draft_ids: what was drafted in the row's place,
    negative in a request's last row. A token counts if every token before it is what was drafted: else it follows a wrong
    beginning.
    """
    wrong = token_ids != draft_ids
    wrong_before = wrong.cumsum() - wrong
    own_start = np.arange(len(ahead)) - ahead
    is_behind_right_ones: np.ndarray = wrong_before == wrong_before[own_start]
    return is_behind_right_ones


def verify_greedy(draft_ids: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """The answer [1 .. k + 1] of a greedy request: accepted drafts and one more token.

    draft_ids [k] int64.   target_logits [k + 1, V]: row i is what the target says after draft i - 1.
    """
    best = target_logits.argmax(dim=-1)
    is_right = best[:-1] == draft_ids
    num_accepted = int(is_right.cumprod(dim=0).sum())  # up to the first wrong one
    return best[: num_accepted + 1]


def rejection_sample(
    draft_ids: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """The answers [B, k + 1] of B requests, INVALID past each one's end. Their distribution is the target's, for any q.

    draft_ids [B, k], drawn from q = draft_probs [B, k, V].   target_probs p [B, k + 1, V], row i after draft i - 1.
    noise [B, k + 1, 2], uniform in [0, 1): of each row, the number that accepts and the number that draws.
    """
    B, k = draft_ids.shape
    p_d = target_probs[:, :k].gather(-1, draft_ids[..., None])[..., 0]
    q_d = draft_probs.gather(-1, draft_ids[..., None])[..., 0]
    accepted = noise[:, :k, 0] * q_d < p_d  # u < p / q, without the division
    num_accepted = accepted.cumprod(dim=-1).sum(dim=-1)

    q = torch.cat([draft_probs, torch.zeros_like(target_probs[:, :1])], dim=1)  # after all drafts there is nothing to refuse
    row = torch.arange(B), num_accepted
    p_B, residual = target_probs[row], (target_probs[row] - q[row]).clamp(min=0)
    # p = q up to rounding, and refused all the same: then the residual may be nothing but zeros
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p_B)
    token = choose(residual.log(), noise[:, :, 1][row])

    place = torch.arange(k + 1, device=draft_ids.device)
    answer = torch.cat([draft_ids, draft_ids.new_full((B, 1), INVALID)], dim=1)
    answer = answer.masked_fill(place > num_accepted[:, None], INVALID)
    return torch.where(place == num_accepted[:, None], token[:, None], answer)


class RejectionSampler:
    """Verifies a batch's drafts by the two functions above, request by request: what runs where this part is replaced. The
    engine itself couples (see the top), for which the sampler alone is enough."""

    capabilities = frozenset({"greedy", "sampling"})

    def __call__(
        self, logits: torch.Tensor, metadata: SamplingMetadata, sampler: Sampler, draft_ids: np.ndarray, ahead: np.ndarray
    ) -> SamplerOutput:
        """As `sampler(logits [N, V], metadata)`, for the rows `is_answer` describes: rows past an answer's end are INVALID."""
        output = sampler(logits, metadata)
        changed = change_logits(logits, metadata) if metadata.changes_logits else logits.float()
        token_ids = output.token_ids.clone()
        for start in (ahead == 0).nonzero()[0].tolist():
            k = 0
            while draft_ids[start + k] >= 0:
                k += 1
            if k == 0:
                continue  # no drafts: the sampler's token is the answer
            rows = slice(start, start + k + 1)
            drafts = torch.from_numpy(draft_ids[start : start + k]).to(logits.device)
            answer = self._verify(drafts, changed[rows], metadata, rows, sampler)
            token_ids[rows] = INVALID
            token_ids[start : start + len(answer)] = answer
        token_ids = torch.where(output.token_ids == INVALID, INVALID, token_ids)
        return SamplerOutput(token_ids, sampler.logprobs(logits, token_ids, metadata))

    @staticmethod
    def _verify(
        drafts: torch.Tensor, logits: torch.Tensor, metadata: SamplingMetadata, rows: slice, sampler: Sampler
    ) -> torch.Tensor:
        start = rows.start
        if not bool((metadata.sampled_rows == start).any()):
            return verify_greedy(drafts, logits)
        own = metadata.of(rows)
        target_probs = sampler.probs(logits, own)
        draft_probs = torch.zeros_like(target_probs[:-1]).scatter_(-1, drafts[:, None], 1.0)  # certain of each draft
        noise = torch.stack([uniform(own.seeds ^ _OTHER_NOISE, own.positions), uniform(own.seeds, own.positions)], dim=-1)
        answer = rejection_sample(drafts[None], draft_probs[None], target_probs[None], noise[None])[0]
        return answer[answer != INVALID]
