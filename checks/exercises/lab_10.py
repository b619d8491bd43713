"""Lab 10's checks: what speculation gains, n-gram drafts, and verification, greedy and by rejection. In the parent only.

The judges are in lab_10_gain.py (10.1), lab_10_drafts.py (10.2, 10.3) and lab_10_reject.py (10.4).
"""

from __future__ import annotations

from checks.exercises import Check
from checks.exercises.lab_10_drafts import judge_propose, judge_verify, propose_cases, verify_cases
from checks.exercises.lab_10_gain import gain_cases, judge_gain
from checks.exercises.lab_10_reject import judge_reject, reject_cases
from checks.sandbox.sandbox import Limits

CHECKS = {
    "10.1": Check(
        cases=gain_cases,
        judge=judge_gain,
        minutes=10,
        difficulty=1,
        hints=(
            "The target's own token comes in every step. When does the first draft count, when the second? Write the chances"
            " for acceptance 0.5 below each other, and add them.",
            "Draft i (1 to k) counts if i drafts in a row are right: acceptance ** i. Adding from i = 0 brings the target's own"
            " token in. The speed-up is tokens divided by time, where time is k drafts and one verification, in plain steps.",
            "expected_tokens: add acceptance ** i for i in range(k + 1)\n"
            "expected_speedup: that, divided by (k times cost_ratio, plus verify_ratio)",
        ),
    ),
    "10.2": Check(
        cases=propose_cases,
        judge=judge_propose,
        minutes=20,
        difficulty=2,
        hints=(
            "Take one length first: where else do the last n tokens stand? Then try lengths from prompt_lookup_max downwards"
            " and stop at the first that has such a place. Only the last place of that length matters.",
            "A place is an index `end` (n <= end < len(token_ids)) with token_ids[end - n : end] equal to token_ids[-n:]. What"
            " followed begins at token_ids[end]. Going through `end` from the back finds the last place first. A length of"
            " len(token_ids) or more cannot have been seen before.",
            "tokens = token_ids.tolist()\nfor n from min(max, len(tokens) - 1) down to the min:\n    for end from"
            " len(tokens) - 1 down to n:\n        if the n tokens before `end` are the last n:\n            k times: append"
            " tokens[end + i] to tokens (it may be one just appended)\n            return the k that were appended\nreturn []",
        ),
    ),
    "10.3": Check(
        cases=verify_cases,
        judge=judge_verify,
        minutes=10,
        difficulty=1,
        hints=(
            "What would the target have said, token by token, without drafts? Its favourite of row 0. If that is draft 0, its"
            " favourite of row 1 is right, too. And if not?",
            "best = target_logits.argmax(dim=-1) is k + 1 tokens. Count how many of the first k equal the drafts before the"
            " first that does not. The answer is that many of `best`, and one more.",
            "best = ...\nn = 0\nwhile n < len(draft_ids) and best[n] equals draft_ids[n]: n += 1\nreturn the first n + 1 of"
            " best",
        ),
    ),
    "10.4": Check(
        cases=reject_cases,
        judge=judge_reject,
        minutes=30,
        difficulty=3,
        limits=Limits(cpu_seconds=20.0, wall_seconds=90.0),
        hints=(
            "Three parts. Which drafts are kept, each for itself? Where is the first that is not? What is drawn there, and what"
            " if there is none? All of it for B requests at once: no loop over B.",
            "p_d = target_probs[:, :k].gather(-1, draft_ids[..., None])[..., 0], and q_d likewise. Kept: noise[:, :k, 0] * q_d"
            " < p_d. The number kept before the first refusal is kept.cumprod(dim=-1).sum(dim=-1), n. In place n stands a draw"
            " from max(p - q, 0) of row n; behind the last draft there is no q, so take zeros for it.",
            "rows = torch.arange(B), n\nq = draft_probs with one more row of zeros behind it (torch.cat)\nresidual ="
            " (target_probs[rows] - q[rows]).clamp(min=0); where it is all zero, target_probs[rows]\ntoken ="
            " choose(residual.log(), noise[rows][:, 1])\nthe answer is INVALID everywhere; then column i of it is draft i where"
            " i < n, and token where i == n",
        ),
    ),
}
