"""The persistent batch: what a step's message changes, and the arrays a step is made of. Blocks of 4."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.core.step import CachedRequestData, NewRequestData, SchedulerOutput
from minivllm.sampling_params import SamplingParams
from minivllm.worker.input_batch import InputBatch, StepInputs, slot_mapping


def new(req_id: str, token_ids: list[int], blocks: list[int], computed: int = 0, **others: Any) -> NewRequestData:
    fields = {"num_prompt_tokens": len(token_ids), "sampling_params": SamplingParams(), "seed": 0, "eos_token_ids": (2,)}
    return NewRequestData(req_id, token_ids, block_ids=blocks, num_computed_tokens=computed, **{**fields, **others})


def run(
    batch: InputBatch,
    scheduled: dict[str, int],
    new_reqs: list[NewRequestData] | None = None,
    cached: list[tuple[str, list[int], int]] | None = None,
    **others: Any,
) -> StepInputs:
    req_ids, blocks, computed = map(list, zip(*cached, strict=True)) if cached else ([], [], [])
    batch.update(
        SchedulerOutput(
            step_id=0,
            scheduled_new_reqs=new_reqs or [],
            scheduled_cached_reqs=CachedRequestData(req_ids, blocks, computed),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            **others,
        )
    )
    return batch.build(scheduled)


def sampled(batch: InputBatch, req_id: str, token_id: int) -> None:
    batch.append_tokens(np.array([batch.rows[req_id]]), np.array([token_id]))


def make_batch(**others: Any) -> InputBatch:
    return InputBatch(**{"max_num_seqs": 4, "max_model_len": 16, "block_size": 4, **others})


# ---------------------------------------------------------------- slots


def test_a_slot_is_the_blocks_number_times_its_size_plus_the_offset() -> None:
    positions = np.array([0, 3, 4, 9])
    assert slot_mapping(positions, np.array([7, 2, 5]), 4).tolist() == [28, 31, 8, 21]


# ---------------------------------------------------------------- the arrays of a step


def test_a_mixed_batch_is_decodes_first_and_otherwise_in_the_schedulers_order() -> None:
    batch = make_batch()
    run(batch, {"d": 4, "e": 3}, [new("d", [10, 11, 12, 13], [3]), new("e", [20, 21, 22], [6])])
    sampled(batch, "d", 14)
    sampled(batch, "e", 23)
    step = run(
        batch,
        {"p": 3, "d": 1, "q": 2, "e": 1},
        [new("p", [30, 31, 32, 33, 34, 35], [5, 9], computed=2), new("q", [40, 41], [8])],
        [("d", [7], 4), ("e", [], 3)],
    )
    assert step.req_ids == ["d", "e", "p", "q"]
    assert step.num_decodes == 2
    assert step.input_ids.tolist() == [14, 23, 32, 33, 34, 40, 41]
    assert step.positions.tolist() == [4, 3, 2, 3, 4, 0, 1]
    assert step.query_start_loc.tolist() == [0, 1, 2, 5, 7]
    assert step.seq_lens.tolist() == [5, 4, 5, 2]
    assert step.block_tables.tolist() == [[3, 7], [6, 0], [5, 9], [8, 0]]
    assert step.slot_mapping.tolist() == [28, 27, 22, 23, 36, 32, 33]
    assert [a.dtype for a in (step.query_start_loc, step.seq_lens, step.block_tables)] == [np.int32] * 3
    assert [a.dtype for a in (step.input_ids, step.positions, step.slot_mapping)] == [np.int64] * 3


def test_a_row_yields_a_token_when_it_reaches_the_end_of_what_is_known() -> None:
    batch = make_batch()
    first = run(batch, {"p": 3, "q": 5}, [new("p", [1, 2, 3, 4, 5], [1, 2]), new("q", [1, 2, 3, 4, 5], [3, 4])])
    assert first.sample_rows.tolist() == [1]
    assert first.logits_indices.tolist() == [7]
    sampled(batch, "q", 9)
    second = run(batch, {"p": 2, "q": 1}, cached=[("p", [], 3), ("q", [], 5)])
    assert second.req_ids == ["q", "p"]
    assert second.sample_rows.tolist() == [0, 1]
    assert second.logits_indices.tolist() == [0, 2]
    assert second.input_ids.tolist() == [9, 4, 5]


def test_a_request_with_drafts_is_a_decode_row_for_each_token_between_decodes_and_chunks() -> None:
    batch = make_batch()
    run(batch, {"v": 3, "d": 2}, [new("v", [1, 2, 3], [3]), new("d", [5, 6], [6])])
    sampled(batch, "v", 4)
    sampled(batch, "d", 7)
    batch.update(
        SchedulerOutput(
            0,
            scheduled_new_reqs=[new("p", [30, 31, 32], [9])],
            scheduled_cached_reqs=CachedRequestData(["v", "d"], [[8], []], [3, 2]),
        )
    )
    step = batch.build({"p": 2, "v": 3, "d": 1}, {"v": [11, 12]})
    assert step.req_ids == ["d", "v", "p"]
    assert step.input_ids.tolist() == [7, 4, 11, 12, 30, 31]
    assert step.token_starts.tolist() == [0, 1, 4, 6]
    assert step.num_decodes == 4
    assert step.query_start_loc.tolist() == [0, 1, 2, 3, 4, 6]
    assert step.seq_lens.tolist() == [3, 4, 5, 6, 2]
    assert step.block_tables.tolist() == [[6, 0], [3, 8], [3, 8], [3, 8], [9, 0]]
    assert step.slot_mapping.tolist() == [26, 15, 32, 33, 36, 37]
    # d yields one token, v up to three: after 4, after 11, after 12
    assert step.sample_rows.tolist() == [0, 1]
    assert step.logits_indices.tolist() == [0, 1, 2, 3]
    assert step.sample_row_of.tolist() == [0, 1, 1, 1]
    assert step.ahead.tolist() == [0, 0, 1, 2]
    assert step.draft_ids.tolist() == [-2, 11, 12, -2]


def test_settings_about_tokens_count_the_drafts_before_each_row() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, repetition_penalty=1.5, bad_words=[])
    batch = make_batch()
    run(batch, {"v": 3}, [new("v", [1, 2, 3], [3], sampling_params=params)])
    sampled(batch, "v", 4)
    batch.update(SchedulerOutput(0, scheduled_cached_reqs=CachedRequestData(["v"], [[8]], [3])))
    step = batch.build({"v": 3}, {"v": [11, 12]})
    asked = batch.sampling_inputs(step.rows[step.sample_rows[step.sample_row_of]], step.ahead)
    assert asked.positions.tolist() == [4, 5, 6]
    assert asked.removed_rows == [0]  # one token is out before the first row: from the second on, two are
    assert asked.penalties is not None
    assert asked.penalties.token_ids.tolist() == [[1, 2, 3, 4, -1, -1], [1, 2, 3, 4, 11, -1], [1, 2, 3, 4, 11, 12]]


def test_accepted_drafts_join_a_row_together() -> None:
    batch = make_batch()
    run(batch, {"a": 2, "b": 2}, [new("a", [1, 2], [3]), new("b", [5, 6], [6])])
    rows = np.array([batch.rows["a"], batch.rows["b"], batch.rows["b"]])
    batch.append_tokens(rows, np.array([7, 8, 9]), np.array([0, 0, 1]))
    assert batch.num_tokens[rows].tolist() == [3, 4, 4]
    assert batch.token_ids[batch.rows["b"], :4].tolist() == [5, 6, 8, 9]


def test_a_prompt_of_one_token_counts_as_a_decode() -> None:
    step = run(make_batch(), {"a": 1}, [new("a", [7], [1])])
    assert step.num_decodes == 1
    assert step.sample_rows.tolist() == [0]


def test_requests_that_are_not_in_the_step_keep_their_state() -> None:
    batch = make_batch()
    run(batch, {"a": 2, "b": 3}, [new("a", [1, 2], [1]), new("b", [3, 4, 5], [2])])
    sampled(batch, "a", 8)
    sampled(batch, "b", 9)
    assert run(batch, {"b": 1}, cached=[("b", [], 3)]).input_ids.tolist() == [9]
    assert run(batch, {"a": 1}, cached=[("a", [], 2)]).input_ids.tolist() == [8]


# ---------------------------------------------------------------- coming, going, coming back


def test_rows_outlive_their_neighbours_and_are_used_again_clean() -> None:
    batch = make_batch(max_num_seqs=2)
    run(batch, {"a": 2, "b": 2}, [new("a", [1] * 9, [1, 2, 3]), new("b", [2, 3], [4])])
    sampled(batch, "b", 5)
    step = run(batch, {"b": 1, "c": 2}, [new("c", [6, 7], [9])], [("b", [], 2)], finished_req_ids=["a"])
    assert step.req_ids == ["b", "c"]
    assert step.input_ids.tolist() == [5, 6, 7]
    assert batch.block_table[batch.rows["c"]].tolist() == [9, 0, 0, 0]  # nothing of a's table is left


def test_a_preempted_request_comes_back_with_its_outputs_and_other_blocks() -> None:
    batch = make_batch()
    run(batch, {"a": 3}, [new("a", [1, 2, 3], [5])])
    sampled(batch, "a", 4)
    run(batch, {"b": 1}, [new("b", [9], [6])], preempted_req_ids=["a"])
    assert "a" not in batch.rows
    step = run(batch, {"a": 4}, [new("a", [1, 2, 3, 4], [7], num_prompt_tokens=3)])
    assert step.input_ids.tolist() == [1, 2, 3, 4]
    assert step.slot_mapping.tolist() == [28, 29, 30, 31]
    assert step.sample_rows.tolist() == [0]


def test_leaving_twice_or_never_having_come_is_nothing_special() -> None:
    batch = make_batch()
    run(batch, {"a": 1}, [new("a", [1], [1])])
    step = run(batch, {"b": 1}, [new("b", [2], [2])], finished_req_ids=["a", "x"], preempted_req_ids=["a"])
    assert step.req_ids == ["b"]
    assert len(batch.rows) == 1


def test_a_request_sent_again_as_new_replaces_what_was_known() -> None:
    """Its last step failed, and the message that it left came with it."""
    batch = make_batch(max_num_seqs=1)
    run(batch, {"a": 2}, [new("a", [1, 2], [1])])
    step = run(batch, {"a": 3}, [new("a", [1, 2, 8], [3])])
    assert step.input_ids.tolist() == [1, 2, 8]
    assert step.block_tables.tolist() == [[3]]


@pytest.mark.parametrize(
    ("scheduled", "arguments", "words"),
    [
        ({"x": 1}, {"cached": [("x", [], 0)]}, "continues request 'x'"),
        ({"b": 1, "c": 1}, {"new_reqs": [new("b", [1], [1]), new("c", [1], [2])]}, "no room for request 'c'"),
        ({"a": 3}, {"cached": [("a", [], 0)]}, "more tokens than request 'a' has"),
        ({"a": 1}, {"cached": [("a", [2, 3, 4, 5], 0)]}, "given 5 blocks; max_model_len fills 4"),
    ],
)
def test_messages_that_cannot_be_true_are_refused(scheduled: dict[str, int], arguments: dict[str, Any], words: str) -> None:
    batch = make_batch(max_num_seqs=2)
    run(batch, {"a": 2}, [new("a", [1, 2], [1])])
    with pytest.raises(ValueError, match=words):
        run(batch, scheduled, **arguments)


@given(data=st.data())
def test_the_arrays_are_what_a_loop_over_tokens_would_write(data: st.DataObject) -> None:
    block_size = data.draw(st.integers(1, 5))
    count = data.draw(st.integers(1, 5))
    batch = InputBatch(count, 30, block_size)
    free = data.draw(st.permutations(range(1, 200)))
    requests, scheduled = [], {}
    for i in range(count):
        length = data.draw(st.integers(1, 30))
        computed = data.draw(st.integers(0, length - 1))
        n = data.draw(st.integers(1, length - computed))
        blocks = [free.pop() for _ in range(-(-(computed + n) // block_size))]
        requests.append(new(f"r{i}", [100 * i + t for t in range(length)], blocks, computed))
        scheduled[f"r{i}"] = n
    step = run(batch, scheduled, requests)

    by_id = {r.req_id: r for r in requests}
    expected_ids, expected_positions, expected_slots, starts = [], [], [], [0]
    for req_id in sorted(scheduled, key=lambda r: scheduled[r] != 1):
        r = by_id[req_id]
        for position in range(r.num_computed_tokens, r.num_computed_tokens + scheduled[req_id]):
            expected_ids.append(r.token_ids[position])
            expected_positions.append(position)
            expected_slots.append(r.block_ids[position // block_size] * block_size + position % block_size)
        starts.append(len(expected_ids))
    assert step.input_ids.tolist() == expected_ids
    assert step.positions.tolist() == expected_positions
    assert step.slot_mapping.tolist() == expected_slots
    assert step.query_start_loc.tolist() == starts
    for i, req_id in enumerate(step.req_ids):
        width = len(by_id[req_id].block_ids)
        assert step.block_tables[i, :width].tolist() == by_id[req_id].block_ids
        assert not step.block_tables[i, width:].any()
        reaches_end = step.seq_lens[i] == len(by_id[req_id].token_ids)
        assert (i in step.sample_rows) == reaches_end


# ---------------------------------------------------------------- a replaced slot_mapping


def test_a_replaced_slot_mapping_is_asked_once_for_the_whole_batch() -> None:
    calls = []

    def mine(positions, block_table, block_size):
        calls.append(len(positions))
        return [int(block_table[p // block_size]) * block_size + int(p) % block_size for p in positions]

    step = run(make_batch(map_slots=mine), {"a": 3, "b": 2}, [new("a", [1, 2, 3, 4, 5, 6], [2, 7], 2), new("b", [1, 2], [3])])
    assert step.slot_mapping.tolist() == [10, 11, 28, 12, 13]
    assert calls == [5]


def test_a_slot_mapping_that_gives_another_number_of_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="slot_mapping gave"):
        run(make_batch(map_slots=lambda positions, table, size: [0]), {"a": 2}, [new("a", [1, 2], [1])])


# ---------------------------------------------------------------- what the sampler is told


def test_end_tokens_are_masked_until_min_tokens_counting_outputs_only() -> None:
    batch = make_batch()
    params = SamplingParams(min_tokens=2, stop_token_ids=[9], max_tokens=8)
    run(
        batch,
        {"a": 3, "b": 2},
        [new("a", [1, 1, 1], [1], sampling_params=params, eos_token_ids=(2, 7)), new("b", [1, 1], [2])],
    )
    for expected in ([2, 7, 9], [2, 7, 9], []):
        rows = np.array([batch.rows["b"], batch.rows["a"]])
        asked = batch.sampling_inputs(rows)
        assert asked.removed_ids == expected
        assert asked.removed_rows == [1] * len(expected)
        sampled(batch, "a", 5)


def test_a_resumed_request_counts_the_outputs_it_brings() -> None:
    batch = make_batch()
    params = SamplingParams(min_tokens=2)
    run(batch, {"a": 4}, [new("a", [1, 1, 5, 5], [1], num_prompt_tokens=2, sampling_params=params)])
    assert batch.sampling_inputs(np.array([0])).removed_ids == []


def test_noise_is_keyed_by_the_seed_and_the_position_of_the_token_to_come() -> None:
    batch = make_batch()
    run(batch, {"a": 3, "b": 1}, [new("a", [1, 2, 3], [1], seed=2**64 - 1), new("b", [1], [2], seed=-5)])
    asked = batch.sampling_inputs(np.array([batch.rows["a"], batch.rows["b"]]))
    assert asked.seeds.tolist() == [-1, -5]
    assert asked.positions.tolist() == [3, 1]


def test_numbers_beyond_the_arrays_types_are_cut_to_what_means_the_same() -> None:
    batch = make_batch()
    params = SamplingParams(temperature=1e300, top_k=2**62, top_p=1e-46, max_tokens=None, min_tokens=2**62)
    run(batch, {"a": 1}, [new("a", [1], [1], sampling_params=params, eos_token_ids=(2,))])
    asked = batch.sampling_inputs(np.array([0]))
    assert np.isfinite(asked.temperature).all() and (asked.top_p > 0).all()
    assert asked.top_k[0] >= 2**31 - 1
    assert asked.removed_ids == [2]


def test_the_null_block_is_nobodys() -> None:
    with pytest.raises(ValueError, match="block 0 is the null block"):
        run(make_batch(), {"a": 5}, [new("a", [1] * 5, [3, 0])])
