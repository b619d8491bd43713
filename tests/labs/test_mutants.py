"""Every check against small wrong turns in its own reference answer (mutation.py): each is rejected, or is listed here with the
reason why it does the same.

In every run a sample of each exercise's mutants; all of them, a minute's work, where slow tests run.
"""

from __future__ import annotations

import random

import pytest

from checks.authoring.source import answer_source
from checks.exercises import find, has_checks, table
from checks.exercises.evaluate import evaluate
from checks.sandbox.sandbox import Limits
from tests.labs.mutation import Mutant, mutants

EXERCISES = [i for i, row in table().items() if has_checks(row.lab)]
LIMITS = Limits(cpu_seconds=3, wall_seconds=20)  # a mutant may loop for ever
SAMPLE = 6
OFF_ROWS = "rows that are off keep all their logits, whatever was computed for them"
MASKED = "what the block of a masked position would be is not used"
SAME = {
    "0.2: return max(flops / device.flops, bytes / device.bandwidth) + launches * device.launch_overhead"
    "  =>  return max(bytes / device.bandwidth, flops / device.flops) + launches * device.launch_overhead": "max is symmetric",
    "1.2: wide = torch.promote_types(q.dtype, torch.float32)"
    "  =>  wide = torch.promote_types(torch.float32, q.dtype)": "promotion is symmetric",
    "2.2: return logits / torch.where(temperature < GREEDY_EPS, 1.0, temperature)[:, None]"
    "  =>  return logits / torch.where(temperature <= GREEDY_EPS, 1.0, temperature)[:, None]": (
        "only a temperature of 1e-5 to the bit tells them apart, and settings raise what is not 0 to 0.01 at least"
    ),
    "2.2: on = (k > 0) & (k < V)  =>  on = (k > 0) & (k <= V)": "k = V keeps all the logits, so it is the same as off",
    "2.2: k = torch.where(on, k, 1)  =>  k = torch.where(on, k, 2)": OFF_ROWS,
    "2.3: sorted_logits, order = logits.sort(dim=-1, descending=True, stable=True)"
    "  =>  sorted_logits, order = logits.sort(dim=-1, descending=True, stable=False)": (
        "which of two equal logits stays is left open by the exercise"
    ),
    "4.2: num_new_blocks = max(0, num_blocks - len(blocks))"
    "  =>  num_new_blocks = max(num_blocks - len(blocks), 0)": "max is symmetric",
    "7.1: header = b'\\x00' * 32 if parent is None else parent"
    "  =>  header = b'\\x00' * 33 if parent is None else parent": "any bytes that no digest can be will do for the first block",
    "7.1: header = b'\\x00' * 32 if parent is None else parent"
    "  =>  header = b'\\x00' * 31 if parent is None else parent": "likewise",
    "7.1: assert isinstance(header, bytes), 'a parent is what hash_block returned for the block before'"
    "  =>  (dropped)": "hashlib says so itself",
    "7.4: for key, block in zip(child.keys, child.blocks, strict=True):"
    "  =>  for key, block in zip(child.keys, child.blocks, strict=False):": "a node has as many keys as blocks",
    "8.1: blocks = tl.load(block_table + positions // BLOCK_SIZE, mask=inside, other=0)"
    "  =>  blocks = tl.load(block_table + positions // BLOCK_SIZE, mask=inside, other=1)": MASKED,
    "8.1: blocks = tl.load(block_table + positions // BLOCK_SIZE, mask=inside, other=0)"
    "  =>  blocks = tl.load(block_table + positions // BLOCK_SIZE, mask=inside, other=-1)": MASKED,
    "8.2: new_best = torch.maximum(best, score_K.max())  =>  new_best = torch.maximum(score_K.max(), best)": "max is symmetric",
    "8.3: block_ids = tl.load(block_table + positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)"
    "  =>  block_ids = tl.load(block_table + positions // BLOCK_SIZE, mask=inside, other=1).to(tl.int64)": MASKED,
    "8.3: block_ids = tl.load(block_table + positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)"
    "  =>  block_ids = tl.load(block_table + positions // BLOCK_SIZE, mask=inside, other=-1).to(tl.int64)": MASKED,
    "8.3: new_best_R = tl.maximum(best_R, tl.max(scores_RK, 1))"
    "  =>  new_best_R = tl.maximum(tl.max(scores_RK, 1), best_R)": "max is symmetric",
    "8.4: best = tl.max(best_P, 0)  =>  best = tl.max(best_P, -1)": "the last axis is the only one",
    "8.4: total = tl.sum(tl.load(totals + row * num_parts + parts, mask=inside, other=0.0) * shrink_P, 0)"
    "  =>  total = tl.sum(tl.load(totals + row * num_parts + parts, mask=inside, other=0.0) * shrink_P, -1)": (
        "the last axis is the only one"
    ),
    "5.2: return None  =>  (dropped)": "a function that ends returns None",
    "6.1: n = min(n, self.max_model_len - 1 - num_computed)  =>  n = min(self.max_model_len - 1 - num_computed, n)": (
        "min is symmetric"
    ),
    "6.1: return min(n, budget)  =>  return min(budget, n)": "min is symmetric",
    "9.2: padding = (0, 0, 0, 1, 0)  =>  padding = (1, 0, 0, 1, 0)": "a padding row may be any token",
    "9.2: padding = (0, 0, 0, 1, 0)  =>  padding = (0, 1, 0, 1, 0)": "and stand at any position",
    "9.2: rows = [padded(array, bucket, value) for array, value in zip(arrays, padding, strict=True)]"
    "  =>  rows = [padded(array, bucket, value) for array, value in zip(arrays, padding, strict=False)]": "five of each",
    "9.2: for target, source in zip(targets, to_device(rows, self.device), strict=True):"
    "  =>  for target, source in zip(targets, to_device(rows, self.device), strict=False):": "likewise",
    "10.2: ends = (token_ids[:n - 1] == token_ids[n - 1]).nonzero()[0] + 1 if n else np.zeros(0, dtype=np.int64)"
    "  =>  ends = (token_ids[:n - 1] == token_ids[n - 1]).nonzero()[-1] + 1 if n else np.zeros(0, dtype=np.int64)": (
        "of one dimension there is one array of places"
    ),
    "10.2: found, length = (-1, 1)  =>  found, length = (-1, 0)": "the newest token is compared twice",
    "10.2: found, length = (-1, 1)  =>  found, length = (-2, 1)": "any negative number stands for no place",
    "10.2: if found < 0:  =>  if found <= 0:": "no place is at 0: a token stands before it",
    "10.2: if found < 0:  =>  if found < 1:": "likewise",
    "10.3: num_accepted = int(is_right.cumprod(dim=0).sum())  =>  num_accepted = int(is_right.cumprod(dim=-1).sum())": (
        "there is one dimension"
    ),
    "10.4: p_d = target_probs[:, :k].gather(-1, draft_ids[..., None])[..., 0]"
    "  =>  p_d = target_probs[:, :k].gather(-1, draft_ids[..., None])[..., -1]": "the last dimension has one entry",
    "10.4: q_d = draft_probs.gather(-1, draft_ids[..., None])[..., 0]"
    "  =>  q_d = draft_probs.gather(-1, draft_ids[..., None])[..., -1]": "likewise",
    "10.4: q = torch.cat([draft_probs, torch.zeros_like(target_probs[:, :1])], dim=1)"
    "  =>  q = torch.cat([draft_probs, torch.zeros_like(target_probs[:, :2])], dim=1)": "a row more than is ever looked at",
    "10.4: answer = answer.masked_fill(place > num_accepted[:, None], INVALID)"
    "  =>  answer = answer.masked_fill(place >= num_accepted[:, None], INVALID)": "the token drawn goes there in the next line",
}

# They differ where the mass before a token is p to the last bit. The check has such a case if this machine's softmax makes one.
EXACT_SUM = (
    "2.3: removed = (mass_before >= p[:, None]) & (p < 1.0)[:, None]"
    "  =>  removed = (mass_before > p[:, None]) & (p < 1.0)[:, None]"
)


def mutants_of(exercise: str) -> list[Mutant]:
    return list(mutants(find(exercise), answer_source(find(exercise))))


def survivors(those: list[Mutant]) -> list[str]:
    """The mutants that their exercise's check accepts."""
    return [m.name for m in those if evaluate(find(m.exercise), m.source, limits=LIMITS).passed]


@pytest.mark.parametrize("exercise", EXERCISES)
def test_a_sample_of_mutants_is_rejected(exercise: str) -> None:
    unlisted = [m for m in mutants_of(exercise) if m.name not in SAME]
    sample = random.Random(exercise).sample(unlisted, min(SAMPLE, len(unlisted)))
    assert survivors(sample) == []


@pytest.mark.slow
@pytest.mark.parametrize("exercise", EXERCISES)
def test_every_mutant_is_rejected_or_explained(exercise: str) -> None:
    found = set(survivors(mutants_of(exercise))) - {EXACT_SUM}
    assert sorted(found) == sorted(name for name in SAME if name.startswith(f"{exercise}: "))


def test_every_explained_mutant_is_still_one() -> None:
    names = {m.name for exercise in EXERCISES for m in mutants_of(exercise)}
    assert [name for name in SAME if name not in names] == []


def test_every_answer_has_mutants_of_each_kind() -> None:
    """The mutator mutates: without mutants every check would look perfect."""
    found = {exercise: mutants_of(exercise) for exercise in EXERCISES}
    assert all(len(those) >= 4 for those in found.values())
    names = {m.name for m in found["4.1"]}
    assert "4.1: if n > self.num_free_blocks:  =>  if n >= self.num_free_blocks:" in names
    assert "4.1: block.ref_cnt -= 1  =>  (dropped)" in names
    assert "4.1: block.ref_cnt -= 1  =>  block.ref_cnt -= 2" in names
