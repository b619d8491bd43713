"""What requests ask about single tokens: allowed and bad ones, bias, penalties. By hand, and against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minivllm.core.step import NewRequestData, SchedulerOutput
from minivllm.sampling.logits import add_bias, apply_penalties, keep_tokens
from minivllm.sampling.sampler import Penalties, Sampler, SamplingMetadata, change_logits
from minivllm.sampling_params import SamplingParams
from minivllm.worker.input_batch import InputBatch, SamplingInputs

INF = float("inf")
V = 50


def metadata(n: int, **rules: object) -> SamplingMetadata:
    zeros = torch.zeros(n, dtype=torch.int64)
    return SamplingMetadata(torch.zeros(n), zeros, zeros, torch.zeros(0, dtype=torch.int64), **rules)  # type: ignore[arg-type]


def penalties(rows: list[tuple[list[int], list[int]]], repetition: float, frequency: float, presence: float) -> Penalties:
    """Of (prompt, output) in each row, padded as the runner does it."""
    longest = max(len(prompt) + len(output) for prompt, output in rows)
    pad = [longest - len(prompt) - len(output) for prompt, output in rows]
    n = len(rows)
    return Penalties(
        rows=torch.arange(n),
        token_ids=torch.tensor([p + o + [V] * k for (p, o), k in zip(rows, pad, strict=True)]),
        is_output=torch.tensor([[False] * len(p) + [True] * len(o) + [False] * k for (p, o), k in zip(rows, pad, strict=True)]),
        repetition=torch.full((n,), repetition),
        frequency=torch.full((n,), frequency),
        presence=torch.full((n,), presence),
    )


def penalized(logits: torch.Tensor, p: Penalties) -> torch.Tensor:
    return apply_penalties(logits, p.token_ids, p.is_output, p.repetition, p.frequency, p.presence)


def random_logits(n: int) -> torch.Tensor:
    return torch.randn(n, V, generator=torch.Generator().manual_seed(1)) * 3


# ---------------------------------------------------------------- by hand


def test_allowed_tokens_are_the_only_ones_left_in_their_row_and_other_rows_are_untouched() -> None:
    out = keep_tokens(torch.tensor([[1.0, 2, 3], [4, 5, 6]]), torch.tensor([1, 1]), torch.tensor([0, 2]))
    assert out.tolist() == [[1, 2, 3], [4, -INF, 6]]


def test_bias_is_added_and_brings_no_removed_token_back() -> None:
    out = add_bias(torch.tensor([[1.0, -INF, 3]]), torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([100.0, -1.5]))
    assert out.tolist() == [[1, -INF, 1.5]]


def test_case_21_repetition_counts_prompt_and_output_the_others_output_only() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, 2.0] + [0.0] * (V - 4)])
    p = penalties([([0, 1], [2, 2])], repetition=2.0, frequency=0.25, presence=0.5)
    assert penalized(logits, p)[0, :4].tolist() == [1.0, -4.0, 1.0 - 2 * 0.25 - 0.5, 2.0]


def test_negative_penalties_make_tokens_likelier() -> None:
    p = penalties([([], [3])], repetition=0.5, frequency=-1.0, presence=-0.5)
    assert penalized(torch.ones(1, V), p)[0, 2:4].tolist() == [1.0, 2.0 + 1.5]


def test_case_21_penalties_do_not_depend_on_the_order_of_the_batch() -> None:
    rows = [([1, 2], [3, 3, 4]), ([5], []), ([7, 7, 7], [1])]
    logits = random_logits(3)
    settings = {"repetition": 1.3, "frequency": 0.4, "presence": 0.2}
    forward = penalized(logits, penalties(rows, **settings))
    backward = penalized(logits.flip(0), penalties(rows[::-1], **settings))
    assert torch.equal(forward, backward.flip(0))


def test_a_row_without_rules_is_not_changed_by_its_neighbours() -> None:
    logits = random_logits(2)
    p = penalties([([1], [2])], 2.0, 1.0, 1.0)
    out = change_logits(logits, metadata(2, penalties=p, bias=(torch.tensor([0]), torch.tensor([9]), torch.tensor([5.0]))))
    assert torch.equal(out[1], logits[1])
    assert not torch.equal(out[0], logits[0])


def test_rules_apply_to_greedy_rows_and_leave_logprobs_raw() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    rules = metadata(1, bias=(torch.tensor([0]), torch.tensor([0]), torch.tensor([9.0])))
    rules.logprobs_rows, rules.num_logprobs = torch.tensor([0]), 1
    out = Sampler()(logits, rules)
    assert out.token_ids.tolist() == [0]
    assert out.logprobs is not None and out.logprobs.token_ids.tolist() == [[0, 2]]
    assert out.logprobs.logprobs[0, 0].item() == pytest.approx(logits.log_softmax(-1)[0, 0].item())


def test_with_nothing_asked_for_the_logits_are_not_touched() -> None:
    assert not metadata(3).changes_logits


# ---------------------------------------------------------------- against transformers


def test_repetition_penalty_equals_transformers() -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits, prompt, output = random_logits(1), [3, 9, 9, 20], [7, 3, 41]
    expected = processors.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits.clone())
    torch.testing.assert_close(penalized(logits, penalties([(prompt, output)], 1.7, 0.0, 0.0)), expected)


def test_logit_bias_equals_transformers() -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits, bias = random_logits(1), {4: 2.5, 11: -3.0, 49: 0.1}
    expected = processors.SequenceBiasLogitsProcessor({(t,): b for t, b in bias.items()})(torch.tensor([[1]]), logits.clone())
    ours = add_bias(logits, torch.zeros(3, dtype=torch.int64), torch.tensor(list(bias)), torch.tensor(list(bias.values())))
    torch.testing.assert_close(ours, expected)


def test_allowed_tokens_equal_transformers_suppression_of_the_others() -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits, allowed = random_logits(1), [4, 11, 49]
    others = [t for t in range(V) if t not in allowed]
    expected = processors.SuppressTokensLogitsProcessor(others)(torch.tensor([[1]]), logits.clone())
    assert torch.equal(keep_tokens(logits, torch.zeros(3, dtype=torch.int64), torch.tensor(allowed)), expected)


@pytest.mark.parametrize("output", [[], [5], [8, 5], [5, 6], [1, 5, 6], [6, 5]])
def test_bad_words_equal_transformers_on_the_output(output: list[int]) -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    words, logits = [[3], [5, 7], [5, 6, 2], [9, 9]], random_logits(1)
    processor = processors.NoBadWordsLogitsProcessor(words, eos_token_id=[])
    expected = processor(torch.tensor([output], dtype=torch.int64), logits.clone())
    inputs = batch_inputs(output, bad_words=words)
    removed = (torch.tensor(inputs.removed_rows), torch.tensor(inputs.removed_ids))
    assert torch.equal(change_logits(logits, metadata(1, removed=removed)), expected)


# ---------------------------------------------------------------- from the persistent batch


def batch_inputs(output: list[int], bad_words: list[list[int]] | None = None, **params: object) -> SamplingInputs:
    """What a request with the prompt [5, 6] asks for its next token after `output`."""
    asked = SamplingParams(**params)  # type: ignore[arg-type]
    asked.bad_words_token_ids = bad_words or []
    batch = InputBatch(4, 32, 4)
    new = NewRequestData("a", [5, 6], 2, asked, 0, (2,), [1], 0)
    batch.update(SchedulerOutput(0, scheduled_new_reqs=[new], num_scheduled_tokens={"a": 2}))
    for token in output:
        batch.append_tokens(np.array([batch.rows["a"]]), np.array([token]))
    return batch.sampling_inputs(np.array([batch.rows["a"]]))


def test_the_batch_tells_prompt_from_output_and_pads_with_nothing() -> None:
    found = batch_inputs([9], repetition_penalty=1.5).penalties
    assert found is not None
    assert found.token_ids.tolist() == [[5, 6, 9]]
    assert found.is_output.tolist() == [[False, False, True]]


def test_case_21_each_penalty_reaches_the_sampler_under_its_own_name() -> None:
    found = batch_inputs([9], repetition_penalty=1.5, frequency_penalty=0.25, presence_penalty=-0.5).penalties
    assert found is not None
    assert (found.repetition.tolist(), found.frequency.tolist(), found.presence.tolist()) == ([1.5], [0.25], [-0.5])


def test_a_bad_word_of_several_tokens_is_looked_for_in_the_output_only() -> None:
    assert batch_inputs([], bad_words=[[6, 7]]).removed_ids == []  # the prompt ends with 6
    assert batch_inputs([6], bad_words=[[6, 7]]).removed_ids == [7]


def test_rules_leave_with_their_request() -> None:
    batch = InputBatch(1, 32, 4)
    for req_id, params in (("a", SamplingParams(logit_bias={3: 1.0}, presence_penalty=1.0)), ("b", SamplingParams())):
        new = NewRequestData(req_id, [5], 1, params, 0, (), [1], 0)
        gone = ["a"] if req_id == "b" else []
        batch.update(SchedulerOutput(0, scheduled_new_reqs=[new], num_scheduled_tokens={req_id: 1}, finished_req_ids=gone))
    inputs = batch.sampling_inputs(np.array([0]))
    assert inputs.bias == [] and inputs.penalties is None
