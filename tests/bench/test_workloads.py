"""Workloads are the same everywhere: seeded, sized as documented."""

from __future__ import annotations

import pytest

from minivllm.bench.report import summary
from minivllm.bench.workloads import uniform


def test_w32_has_the_lengths_it_promises():
    work = uniform(32, vocab_size=49152)
    assert len(work) == 32
    assert all(32 <= len(r.prompt_token_ids) <= 256 and 32 <= r.output_len <= 128 for r in work)
    assert all(100 <= t < 49152 for r in work for t in r.prompt_token_ids)


def test_the_same_seed_gives_the_same_work_and_another_seed_another():
    assert uniform(8, vocab_size=1000) == uniform(8, vocab_size=1000)
    assert uniform(8, vocab_size=1000) != uniform(8, vocab_size=1000, seed=1)


def test_lengths_do_not_depend_on_the_vocabulary():
    sizes = [[(len(r.prompt_token_ids), r.output_len) for r in uniform(8, vocab_size=v)] for v in (1000, 150000)]
    assert sizes[0] == sizes[1]


def test_no_prompts_is_refused():
    with pytest.raises(ValueError, match="num_prompts"):
        uniform(0, vocab_size=1000)


def test_a_summary_is_of_medians_and_says_its_spread():
    assert summary([10.0, 12.0, 11.0]) == {"median": 11.0, "min": 10.0, "max": 12.0, "spread": pytest.approx(2 / 11)}
