"""Workloads are the same everywhere: seeded, sized as documented."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench import material
from minivllm.bench.report import summary
from minivllm.bench.workloads import NAMES, load, make, uniform, word_ids


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


# ---------------------------------------------------------------------- named workloads


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_is_its_name_and_seed(name: str):
    assert make(name, n=4, seed=7) == make(name, n=4, seed=7)
    assert make(name, n=4, seed=7) != make(name, n=4, seed=8)
    assert (make(name, n=4, seed=7).name, make(name, n=4, seed=7).seed) == (name, 7)


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_comes_back_from_its_file(name: str, tmp_path: Path):
    workload = make(name, n=3, rate=2.0)
    workload.save(tmp_path / "w.jsonl")
    assert load(tmp_path / "w.jsonl") == workload


def test_no_machine_makes_another_text():
    """A change of the material or of how it is drawn changes every recorded workload: it must be meant."""
    texts = "\n".join(f"{r.prompt or r.prompt_token_ids} {r.max_tokens}" for name in NAMES for r in make(name, n=3).requests)
    assert hashlib.sha256(texts.encode()).hexdigest()[:16] == "8e24c41dea6d93da"


def test_uniform_has_the_numbers_of_w_n():
    work = uniform(8, vocab_size=1000)
    requests = make("uniform", n=8, vocab_size=1000).requests
    assert [(r.prompt_token_ids, r.max_tokens) for r in requests] == [(w.prompt_token_ids, w.output_len) for w in work]


def test_fixed_is_fixed():
    requests = make("fixed", n=5, prompt_len=7, max_tokens=3).requests
    assert [(len(r.prompt_token_ids or []), r.max_tokens) for r in requests] == [(7, 3)] * 5


def test_mixed_has_both_kinds():
    for n in (2, 5, 20):
        requests = make("mixed", n=n, long_share=0.1).requests
        long = [r for r in requests if r.group == "long"]
        assert len(requests) == n and len(long) == max(1, round(0.1 * n))
        assert all(len(r.prompt_token_ids or []) >= 512 for r in long)
        assert all(len(r.prompt_token_ids or []) <= 64 for r in requests if r.group == "short")


def test_no_two_prompts_of_no_sharing_begin_alike():
    firsts = [r.prompt_token_ids[0] for r in make("no_sharing", n=300).requests if r.prompt_token_ids]
    assert len(set(firsts)) == 300
    with pytest.raises(ValueError, match="n=200 prompts cannot begin differently with 50"):
        make("no_sharing", n=200, vocab_size=150)


def test_each_turn_of_a_chat_extends_the_last_one():
    workload = make("chat", n=3, turns=4)
    for i in range(1, 4):
        turns = [r.prompt for r in workload.requests if r.group == f"chat-{i}"]
        assert len(turns) == 4
        for before, after in pairwise(turns):
            assert before and after and after.startswith(before) and after.endswith("\nAssistant:")
    assert Counter(r.turn for r in workload.requests) == {0: 3, 1: 3, 2: 3, 3: 3}
    system = {r.prompt.split("\n\n")[0] for r in workload.requests if r.prompt}
    assert len(system) == 1


def common_beginning(texts: list[str]) -> str:
    shortest = min(texts, key=len)
    end = next((i for i, c in enumerate(shortest) if any(text[i] != c for text in texts)), len(shortest))
    return shortest[:end]


def test_few_shot_prompts_share_all_but_the_question():
    prompts = [r.prompt or "" for r in make("few_shot", n=6).requests]
    shared = common_beginning(prompts)
    assert len(set(prompts)) == 6 and "Answer 6:" in shared and all(len(p) - len(shared) < 200 for p in prompts)
    assert {r.group for r in make("few_shot", n=6, num_tasks=3).requests} == set(material.TASKS)


def test_a_tree_branches_at_every_level():
    workload = make("tree_of_thought", n=2, branches=3, depth=2)
    assert Counter(r.turn for r in workload.requests) == {0: 2, 1: 6, 2: 18}
    nodes = {r.prompt: r.turn for r in workload.requests if r.group == "tree-1"}
    for prompt, turn in nodes.items():
        parents = [p for p, t in nodes.items() if t == turn - 1 and prompt and p and prompt.startswith(p)]
        assert len(parents) == (0 if turn == 0 else 1)


def test_questions_about_a_document_share_it():
    workload = make("long_document", n=2, doc_words=200, questions=3)
    prompts = [r.prompt or "" for r in workload.requests if r.group == "doc-1"]
    assert len(prompts) == 3 and len(common_beginning(prompts).split()) > 200
    assert [r.group for r in workload.requests] == ["doc-1", "doc-2"] * 3


@pytest.mark.parametrize("name", NAMES)
def test_poisson_arrivals_have_their_rate_and_leave_the_prompts_alone(name: str):
    workload, still = make(name, n=6, rate=5.0), make(name, n=6)
    assert sorted(map(repr, workload.prompts())) == sorted(map(repr, still.prompts()))
    times = [r.arrival_s for r in workload.requests]
    assert times == sorted(times) and times[0] > 0 and all(r.arrival_s == 0 for r in still.requests)


def test_the_mean_gap_is_one_over_the_rate_and_scales_with_it():
    slow, fast = make("fixed", n=4000, rate=1.0, prompt_len=1), make("fixed", n=4000, rate=10.0, prompt_len=1)
    assert slow.requests[-1].arrival_s == pytest.approx(4000, rel=0.05)
    assert slow.requests[-1].arrival_s == pytest.approx(10 * fast.requests[-1].arrival_s)


def test_later_turns_arrive_with_their_conversation():
    for request in (workload := make("chat", n=3, rate=1.0)).requests:
        first = next(r for r in workload.requests if r.group == request.group and r.turn == 0)
        assert request.arrival_s == first.arrival_s


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "chess"}, "no workload 'chess'. There are: fixed, uniform, chat"),
        ({"name": "chat", "branches": 2}, "no parameter 'branches'. It has: seed, rate, turns"),
        ({"name": "chat", "n": 0}, "n must be an integer of at least 1"),
        ({"name": "chat", "turns": 1.5}, "turns must be an integer of at least 1"),
        ({"name": "uniform", "prompt_len": (9, 3)}, "prompt_len must be a range"),
        ({"name": "fixed", "rate": 0}, "rate must be a positive number"),
        ({"name": "fixed", "vocab_size": 50}, "vocab_size=50 is too small"),
        ({"name": "mixed", "long_share": 2}, "long_share must be between 0 and 1"),
        ({"name": "few_shot", "shots": 10}, "shots must be at most 9"),
        ({"name": "few_shot", "num_tasks": 4}, "num_tasks must be at most 3"),
        ({"name": "long_document", "questions": 99}, "questions must be at most 12"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("[" * 50_000 + "\n", "line 1"),
        ('{"format": "minivllm-trace", "version": 1}\n', "line 1 .* format 'minivllm-workload'"),
        ('{"format":"minivllm-workload","version":1,"name":"x","seed":0}\n{"prompt":null,"prompt_token_ids":null,"max_tokens":1}\n',
         "line 2 .* needs a prompt"),
        ('{"format":"minivllm-workload","version":1,"name":"x","seed":0}\n{"text":"a"}\n', "line 2"),
    ],
)  # fmt: skip
def test_another_file_is_refused_with_its_line(text: str, message: str, tmp_path: Path):
    (tmp_path / "x.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "x.jsonl")


def test_words_become_ids_that_keep_what_is_shared():
    before, after = word_ids("the fox and the dog", 1000), word_ids("the fox and the dog and the cat", 1000)
    assert after[:5] == before and before[0] == before[3] and all(100 <= i < 1000 for i in after)
    encoded = make("chat", n=2).encoded(lambda text: word_ids(text, 1000))
    assert all(r.prompt and r.prompt_token_ids == word_ids(r.prompt, 1000) for r in encoded.requests)
    assert all(isinstance(prompt, dict) for prompt in encoded.prompts())


def test_there_are_words_enough_and_no_sentence_twice():
    sentences = [s for several in material.SENTENCES.values() for s in several]
    assert len(sentences) == len(set(sentences)) >= 100
    assert all(s[0].isupper() and s.endswith(".") for s in sentences)
