"""The engine made of Lab 07's solution: what is cached is found, and the answers are those of an engine that caches nothing.

The control plane is compared on the echo model, bit for bit. minivllm's own versions of the parts are made to fail first, so
that none of them can have done the work.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import minivllm.core.block_hash
import minivllm.core.radix_cache
from minivllm.components import Components
from minivllm.core.block_pool import BlockPool
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.radix_cache import RadixCache
from tests.core.harness import Driver, make_engine, make_request, oracle
from tests.labs import harness
from tests.labs.harness import gone

EXERCISES = {"7.1": "block_hash", "7.2": "kv_cache_manager", "7.3": "block_pool", "7.4": "radix_cache"}
HASH_CHAIN = ("block_hash", "kv_cache_manager", "block_pool")
TREE = ("block_pool", "radix_cache")


@pytest.fixture
def solved(student: Path) -> Components:
    """The parts of a student who wrote what the solutions of Labs 04 and 07 say: Lab 04's pool and tables are overtaken."""
    return harness.solved("4.1", "4.2", *EXERCISES)


@pytest.fixture
def without_minivllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gone(monkeypatch, minivllm.core.block_hash, "hash_block")
    gone(monkeypatch, KVCacheManager, "find_longest_cache_hit")
    gone(monkeypatch, BlockPool, "free", "touch")
    gone(monkeypatch, RadixCache, "match_prefix")


def prompts_that_share(rng: random.Random, count: int) -> list[list[int]]:
    stems = [[rng.randrange(50, 60) for _ in range(rng.randint(4, 24))] for _ in range(3)]
    return [[*rng.choice(stems), *(rng.randrange(60, 64) for _ in range(rng.randint(1, 6)))] for _ in range(count)]


def run(parts: dict[str, Any], num_blocks: int, seed: int, **settings: Any) -> int:
    """Random requests that share beginnings, some aborted; each that ends must say what the echo model says. Returns how many
    prompt tokens were found."""
    rng = random.Random(seed)
    driver = Driver(make_engine(num_blocks, components=parts, max_num_seqs=4, **settings))
    requests = [make_request(f"r{i}", prompt, rng.randint(1, 9)) for i, prompt in enumerate(prompts_that_share(rng, 20))]
    for i, request in enumerate(requests):
        driver.add(request)
        for _ in range(rng.randrange(3)):
            driver.step()
        if i in (5, 11):
            driver.engine.abort_requests([f"r{i - 1}"])
    driver.run()
    ended = [request for request in requests if driver.answers[request.request_id].finish_reason]
    assert len(ended) >= 18
    for request in ended:
        assert driver.answers[request.request_id].token_ids == oracle(driver.engine, request)[0], request.request_id
    return sum(answer.num_cached_tokens for answer in driver.answers.values())


def test_the_labs_parts_are_components_and_lab_04s_stages_are_gone(solved: Components) -> None:
    assert sorted(solved) == sorted(EXERCISES.values())
    for seam, part in solved.items():
        assert ".my_engine." in part.__module__, seam
    assert solved["block_pool"].capabilities == BlockPool.capabilities
    assert solved["kv_cache_manager"].capabilities == KVCacheManager.capabilities


def test_prefix_caching_is_on_again(solved: Components) -> None:
    assert make_engine(components=dict(solved)).config.enable_prefix_caching is not False
    make_engine(components=dict(solved), enable_prefix_caching=True)


@pytest.mark.usefixtures("without_minivllms_own")
@pytest.mark.parametrize("num_blocks", [200, 24, 11], ids=["plenty", "evicts", "preempts"])
@pytest.mark.parametrize("seed", range(3))
def test_the_hash_chain_finds_beginnings_and_answers_as_the_echo_model_does(
    solved: Components, num_blocks: int, seed: int
) -> None:
    assert run({seam: solved[seam] for seam in HASH_CHAIN}, num_blocks, seed) > 0


@pytest.mark.usefixtures("without_minivllms_own")
@pytest.mark.parametrize("num_blocks", [200, 24, 11], ids=["plenty", "evicts", "preempts"])
@pytest.mark.parametrize("seed", range(3))
def test_the_tree_finds_beginnings_and_answers_as_the_echo_model_does(solved: Components, num_blocks: int, seed: int) -> None:
    assert run({seam: solved[seam] for seam in TREE}, num_blocks, seed, prefix_cache="radix") > 0


@pytest.mark.parametrize("seam", EXERCISES.values())
def test_each_part_works_with_minivllms_others(solved: Components, seam: str) -> None:
    cache = {"prefix_cache": "radix"} if seam == "radix_cache" else {}
    found = run({seam: solved[seam]}, 24, 0, **cache)
    assert found == run({}, 24, 0, **cache) > 0


def test_salts_keep_tenants_apart(solved: Components) -> None:
    driver = Driver(make_engine(components={seam: solved[seam] for seam in HASH_CHAIN}))
    found = []
    for name, salt in (("a", None), ("b", None), ("c", "x"), ("d", "y"), ("e", "x")):
        driver.add(make_request(name, [7] * 10, cache_salt=salt))
        found.append(driver.run()[name].num_cached_tokens)
    assert found == [0, 8, 0, 0, 8]
