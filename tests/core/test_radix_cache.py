"""RadixCache: what a path matches, how a node is parted, what goes when a block is taken; and that engines with either prefix
cache answer alike."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.components import Components
from minivllm.config import EngineConfig
from minivllm.core.block_pool import BlockPool, KVCacheBlock
from minivllm.core.engine_core import EngineCore
from minivllm.core.radix_cache import BlockKey, RadixCache, RadixKVCacheManager, block_key
from minivllm.sim.echo import EchoExecutor
from tests.core.harness import Driver, compute, core_request, examples, generate, make_engine, make_request

BLOCKS = [KVCacheBlock(i) for i in range(200)]


def keys_of(text: str) -> list[BlockKey]:
    """One letter, one block: "ab" is a block of 4 a's, then one of 4 b's."""
    return [block_key(None, [ord(letter)] * 4) for letter in text]


def grown(**paths: list[int]) -> RadixCache:
    """A tree with some paths in it: text -> the ids of its blocks. What is there already keeps its block."""
    tree = RadixCache()
    for text, ids in paths.items():
        start = len(tree.match_prefix(keys_of(text)))
        assert tree.insert(keys_of(text), [BLOCKS[i] for i in ids], start, len(text))[1] == []
    return tree


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def shape(tree: RadixCache) -> set[tuple[int, ...]]:
    return {tuple(ids(node.blocks)) for node in tree}


# ---------------------------------------------------------------- the tree


def test_a_path_is_matched_as_far_as_it_is_the_same():
    tree = grown(abc=[1, 2, 3])
    assert [ids(tree.match_prefix(keys_of(text))) for text in ("abc", "abcd", "ab", "abx", "xbc", "")] == [
        [1, 2, 3], [1, 2, 3], [1, 2], [1, 2], [], [],
    ]  # fmt: skip


def test_a_match_leaves_the_tree_as_it_is():
    tree = grown(abcd=[1, 2, 3, 4])
    tree.match_prefix(keys_of("abx"))
    assert shape(tree) == {(1, 2, 3, 4)}


def test_a_node_is_parted_where_paths_part():
    tree = grown(abcd=[1, 2, 3, 4], abxy=[1, 2, 5, 6])
    assert shape(tree) == {(1, 2), (3, 4), (5, 6)}
    assert ids(tree.match_prefix(keys_of("abcd"))) == [1, 2, 3, 4]
    assert ids(tree.match_prefix(keys_of("abxy"))) == [1, 2, 5, 6]


def test_a_node_parted_twice_keeps_its_children():
    tree = grown(abcd=[1, 2, 3, 4], abxy=[1, 2, 5, 6], abxz=[1, 2, 5, 7], az=[1, 8])
    assert shape(tree) == {(1,), (2,), (3, 4), (5,), (6,), (7,), (8,)}
    assert ids(tree.match_prefix(keys_of("abxz"))) == [1, 2, 5, 7]
    assert {node.start: ids(node.blocks) for node in tree if node.blocks[0].block_id in (2, 5, 7)} == {1: [2], 2: [5], 3: [7]}


def test_a_leaf_grows_in_place():
    """A request that generates adds a block at a time, and makes no node for each."""
    tree = grown(a=[1])
    for n in range(1, 20):
        tree.insert(keys_of("a" * (n + 1)), BLOCKS[1 : n + 2], n, n + 1)
    assert shape(tree) == {tuple(range(1, 21))}


def test_evicting_the_end_of_a_leaf_leaves_the_rest():
    tree = grown(abc=[1, 2, 3], abx=[1, 2, 4])
    assert ids(tree.evict(BLOCKS[3])) == [3]
    assert ids(tree.match_prefix(keys_of("abc"))) == [1, 2]
    assert shape(tree) == {(1, 2), (4,)}


def test_evicting_a_block_takes_all_that_hangs_on_it():
    tree = grown(abc=[1, 2, 3], abx=[1, 2, 4], q=[5])
    assert sorted(ids(tree.evict(BLOCKS[2]))) == [2, 3, 4]
    assert (shape(tree), len(tree)) == ({(1,), (5,)}, 2)
    assert ids(tree.evict(BLOCKS[1])) == [1] and tree.match_prefix(keys_of("abc")) == []


def test_evicting_a_block_that_is_not_cached_is_nothing():
    tree = grown(abc=[1, 2, 3])
    assert tree.evict(BLOCKS[9]) == [] and len(tree) == 3


def test_an_insertion_goes_on_from_the_middle_of_a_node():
    tree = grown(abcd=[1, 2, 3, 4])
    assert ids(tree.insert(keys_of("abxy"), [BLOCKS[i] for i in (1, 2, 5, 6)], 2, 4)[0]) == [5, 6]
    assert shape(tree) == {(1, 2), (3, 4), (5, 6)}


def test_a_block_computed_again_replaces_one_that_nobody_holds():
    tree = grown(abc=[1, 2, 3])
    added, replaced = tree.insert(keys_of("abc"), [BLOCKS[i] for i in (1, 7, 8)], 1, 2)
    assert (ids(added), ids(replaced)) == ([7], [2])
    assert ids(tree.match_prefix(keys_of("abc"))) == [1, 7, 3]
    assert BLOCKS[2] not in tree and tree.evict(BLOCKS[2]) == []


def test_a_block_that_somebody_holds_is_not_replaced_and_ends_the_insertion():
    tree, held = RadixCache(), KVCacheBlock(50, ref_cnt=1)
    tree.insert(keys_of("ab"), [BLOCKS[1], held], 0, 2)
    assert tree.insert(keys_of("abc"), [BLOCKS[i] for i in (1, 7, 8)], 1, 3) == ([], [])
    assert tree.match_prefix(keys_of("ab")) == [BLOCKS[1], held]


def test_nothing_is_added_behind_a_block_that_was_taken_back():
    tree = grown(ab=[1, 2])
    tree.evict(BLOCKS[2])
    assert tree.insert(keys_of("abc"), BLOCKS[1:4], 2, 3) == ([], [])
    assert shape(tree) == {(1,)}


@given(st.data())
def test_the_tree_finds_what_a_dict_of_all_prefixes_would(data: st.DataObject):
    """Against the plainest model of a prefix cache, under insertions and evictions."""
    tree, model, numbers = RadixCache(), dict[str, KVCacheBlock](), itertools.count()
    texts = data.draw(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=12))
    for text in texts:
        hits = tree.match_prefix(keys_of(text))
        blocks = [*hits, *(KVCacheBlock(next(numbers)) for _ in range(len(text) - len(hits)))]
        tree.insert(keys_of(text), blocks, len(hits), len(text))
        model |= {text[: i + 1]: blocks[i] for i in range(len(hits), len(text))}
        if data.draw(st.booleans()):
            prefix = data.draw(st.sampled_from(sorted(model)))
            lost = {other: block for other, block in model.items() if other.startswith(prefix)}
            assert sorted(ids(tree.evict(model[prefix]))) == sorted(ids(list(lost.values())))
            model = {other: block for other, block in model.items() if other not in lost}
        for other in texts:
            found = [model[other[: i + 1]] for i in range(len(other)) if other[: i + 1] in model]
            assert tree.match_prefix(keys_of(other)) == found
        assert len(tree) == len(model)


# ---------------------------------------------------------------- the manager


def make_manager(num_blocks: int = 11, **options: Any) -> RadixKVCacheManager:
    return RadixKVCacheManager(BlockPool(num_blocks), 4, 40, **options)


def test_the_block_of_a_replaced_twin_is_the_next_to_be_handed_out():
    manager = make_manager()
    first = core_request(8, "first")
    assert compute(manager, first, 8) == [1, 2]
    manager.free(first)
    assert compute(manager, core_request(8, "again"), 4) == [3]  # hits block 1, computes the second block again
    assert len(manager.radix_cache) == 2 and manager.block_pool.free_block_queue.popleft().block_id == 2


def test_what_stands_behind_a_twin_is_published_once_the_others_block_is_free():
    manager = make_manager()
    first, second = core_request(8, "first"), core_request(8, "second")
    compute(manager, first, 8)
    compute(manager, second, 4)
    second.all_token_ids += [50, 51, 52, 53]
    compute(manager, second, 4)
    assert second.num_published_blocks == 1 and len(manager.radix_cache) == 2
    manager.free(first)
    second.all_token_ids += [60, 61, 62, 63]
    compute(manager, second, 4)
    assert second.num_published_blocks == 4 and len(manager.radix_cache) == 4


def test_evicted_blocks_leave_the_tree_tail_first():
    manager = make_manager(num_blocks=5)
    first = core_request(16, "first")
    compute(manager, first, 16)
    manager.free(first)
    found = []
    for i in range(4):
        found.append(len(manager.radix_cache.match_prefix(first.block_hashes)))  # type: ignore[arg-type]
        compute(manager, core_request([90 + i] * 4, f"other{i}"), 4)
    assert found == [4, 3, 2, 1]


def test_a_request_whose_prefix_is_taken_back_publishes_no_more():
    """It was shared with one whose step failed: nobody is to find what hangs on it."""
    manager = make_manager()
    first, second = core_request(8, "first"), core_request([*range(8), 50, 51, 52, 53], "second")
    manager.allocate_slots(first, 8)
    first.num_computed_tokens = first.num_in_flight_tokens = 8
    compute(manager, second, 4)
    assert len(manager.radix_cache) == 3
    manager.free(first)
    assert len(manager.radix_cache) == 0
    second.all_token_ids += [60, 61, 62, 63]
    compute(manager, second, 4)
    assert len(manager.radix_cache) == 0


# ---------------------------------------------------------------- the engine


@settings(max_examples=examples(60))
@given(st.integers(0, 10**9), st.integers(6, 20), st.sampled_from(["fcfs", "longest_prefix"]))
def test_radix_and_hash_agree_with_evictions_and_aborts(seed: int, num_blocks: int, policy: str):
    answers = []
    for cache in ("hash", "radix"):
        rng = random.Random(seed)
        engine = make_engine(num_blocks, prefix_cache=cache, scheduling_policy=policy, max_num_seqs=3, echo={"vocab_size": 5})
        driver = Driver(engine)
        for i in range(12):
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 4 * (num_blocks - 1) - 4))]
            driver.add(make_request(f"r{i}", prompt, max_tokens=rng.randint(1, 6)))
            for _ in range(rng.randrange(4)):
                driver.step()
            if rng.random() < 0.2:
                engine.abort_requests([f"r{rng.randrange(i + 1)}"])
        driver.run()
        answers.append({name: answer.token_ids for name, answer in driver.answers.items() if answer.finish_reason})
    assert all(answers[0][name] == answers[1][name] for name in answers[0].keys() & answers[1].keys())
    assert answers[0].keys() & answers[1].keys()


def test_the_second_turn_finds_the_first_in_either_cache(prefix_cache: str):
    engine = make_engine(400)
    first = make_request("first", 1000, max_tokens=8)
    reply = generate(engine, first)["first"].token_ids
    second = make_request("second", [*first.prompt_token_ids, *reply, *range(700, 720)])
    assert generate(engine, second)["second"].num_cached_tokens == 1004  # 1,007 tokens have KV, the last reply token has not


def test_reset_prefix_cache_empties_the_tree():
    engine = make_engine(prefix_cache="radix")
    generate(engine, make_request("a", [5] * 40))
    manager = engine.scheduler.kv_cache_manager
    assert len(manager.radix_cache) > 0 and engine.reset_prefix_cache() and len(manager.radix_cache) == 0
    assert generate(engine, make_request("b", [5] * 40))["b"].num_cached_tokens == 0


def test_reset_prefix_cache_is_refused_while_a_request_runs():
    driver = Driver(make_engine(prefix_cache="radix"))
    driver.add(make_request("a", [5] * 40))
    driver.step()
    assert not driver.engine.reset_prefix_cache() and len(driver.engine.scheduler.kv_cache_manager.radix_cache) == 10


@pytest.mark.parametrize("asks", [{"prefix_cache": "radix"}, {"scheduling_policy": "longest_prefix"}])
def test_what_needs_a_prefix_cache_is_refused_without_one(asks: dict[str, Any]):
    with pytest.raises(ValueError, match="needs a prefix cache, which enable_prefix_caching=False forbids"):
        EngineConfig(enable_prefix_caching=False, **asks)


@pytest.mark.parametrize("asks", [{"prefix_cache": "radix"}, {"scheduling_policy": "longest_prefix"}])
def test_a_pool_that_cannot_cache_is_refused_by_name(asks: dict[str, str]):
    class Pool(BlockPool):
        capabilities = frozenset({"allocate"})

    ((name, value),) = asks.items()
    with pytest.raises(ValueError, match=f"{name}='{value}' needs 'caching', which your block_pool"):
        make_engine(components={"block_pool": Pool}, **asks)


def test_a_tree_of_ones_own_is_plugged_in_and_the_hash_chains_parts_are_said_to_be_unused(caplog: pytest.LogCaptureFixture):
    calls: list[int] = []

    class Mine(RadixCache):
        def match_prefix(self, keys: Any) -> list[KVCacheBlock]:
            calls.append(len(keys))
            return super().match_prefix(keys)

    parts = {"radix_cache": Mine, "block_hash": lambda parent, tokens, extra=(): None}
    config = EngineConfig(block_size=4, prefix_cache="radix").resolved("cpu")
    with caplog.at_level("INFO", logger="minivllm"):
        engine = EngineCore(config, EchoExecutor(101, 4), Components(parts))
    assert generate(engine, make_request("a", 9)) and calls == [2]
    assert "prefix_cache='radix' does not use your block_hash" in caplog.text


def test_tenants_and_adapters_begin_at_branches_of_their_own(prefix_cache: str):
    driver = Driver(make_engine())
    for i, fields in enumerate([{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"lora_digest": "a"}]):
        for again in (0, 1):
            driver.add(make_request(f"r{i}{again}", [7] * 10, **fields))
            assert driver.run()[f"r{i}{again}"].num_cached_tokens == 8 * again
