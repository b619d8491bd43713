"""Parts as students have them half way through the labs, in the real engine: what they cannot do is off, or refused by name."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import pytest

from minivllm.components import Components
from minivllm.config import EngineConfig
from minivllm.core.block_pool import BlockPool, KVCacheBlock
from minivllm.core.engine_core import EngineCore, apply_capabilities
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.step import FinishReason, SchedulerOutput
from minivllm.sim.echo import EchoExecutor
from tests.core.harness import Answer, make_engine, make_request, oracle

PROMPTS = {"a": 9, "b": 6, "c": 13, "d": 1}


class Lab04Pool:
    """Allocate and free, and nothing else."""

    capabilities = frozenset({"allocate"})

    def __init__(self, num_blocks: int) -> None:
        self._free = deque(KVCacheBlock(i) for i in range(1, num_blocks))

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[KVCacheBlock]:
        if n > len(self._free):
            raise ValueError(f"Cannot allocate {n} blocks: {len(self._free)} are free.")
        return [self._free.popleft() for _ in range(n)]

    def free(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._free.extend(blocks)


class Lab04Methods(BlockPool):
    """The same as an exercise: two methods of the reference class replaced, with no thought of hashes."""

    capabilities = frozenset({"allocate"})

    def allocate(self, n: int) -> list[KVCacheBlock]:
        if n > self.num_free_blocks:
            raise ValueError(f"Cannot allocate {n} blocks: {self.num_free_blocks} are free.")
        blocks = [self.free_block_queue.popleft() for _ in range(n)]
        for block in blocks:
            block.ref_cnt = 1
        return blocks

    def free(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            block.ref_cnt = 0
            self.free_block_queue.append(block)


class Lab04Manager(KVCacheManager):
    """allocate_slots with the two arguments it has in Lab 04."""

    capabilities = frozenset({"paging"})

    def allocate_slots(self, request: Request, num_new_tokens: int) -> list[KVCacheBlock] | None:  # type: ignore[override]
        blocks = self.req_to_blocks.setdefault(request.request_id, [])
        missing = -(-(request.num_computed_tokens + num_new_tokens) // self.block_size) - len(blocks)
        if missing > self.block_pool.num_free_blocks:
            return None
        new_blocks = self.block_pool.allocate(max(0, missing))
        blocks += new_blocks
        return new_blocks


class Lab05Scheduler(Scheduler):
    """Whole prompts: a step gives every running request its one token, then admits prompts that fit in as they are."""

    capabilities = frozenset({"stops", "whole prompts", "preemption"})

    def schedule(self) -> SchedulerOutput:
        step = self.open_step()
        for request in self.running_in_order():
            if not self.advance(step, request, 1):
                break
        while (request := self.next_in_line()) is not None:
            n = request.num_tokens
            if n > self.budget_left(step) or not self.admit(step, request, n):
                break
        return self.close_step(step)


class NoPreemption(Lab05Scheduler):
    capabilities = frozenset({"stops", "whole prompts"})


def run(engine: EngineCore) -> dict[str, Answer]:
    requests = [make_request(name, n, max_tokens=8) for name, n in PROMPTS.items()]
    answers = {request.request_id: Answer() for request in requests}
    for request in requests:
        engine.add_request(request)
    for _ in range(500):
        for output in engine.step():
            answers[output.request_id].token_ids += output.new_token_ids
            answers[output.request_id].finish_reason = output.finish_reason
    assert not engine.has_unfinished_requests()
    assert all(answers[r.request_id].token_ids == oracle(engine, r)[0] for r in requests)
    return answers


@pytest.mark.parametrize("num_blocks", [101, 8])
@pytest.mark.parametrize(
    "parts",
    [
        {"block_pool": Lab04Pool},
        {"block_pool": Lab04Methods},
        {"kv_cache_manager": Lab04Manager},
        {"scheduler": Lab05Scheduler},
        {"block_pool": Lab04Pool, "kv_cache_manager": Lab04Manager, "scheduler": Lab05Scheduler},
        {"block_hash": lambda parent, tokens, extra=(): hash((parent, *tokens))},
    ],
    ids=lambda parts: "+".join(parts),
)
def test_a_students_part_serves_in_the_real_engine(parts: dict[str, Any], num_blocks: int):
    """With plenty of blocks, and with so few that requests are preempted."""
    run(make_engine(num_blocks, components=parts, max_num_batched_tokens=32))


@pytest.mark.parametrize("part", [Lab04Pool, Lab04Methods])
def test_a_pool_without_caching_switches_prefix_caching_off_with_one_line(part: type, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", logger="minivllm"):
        engine = make_engine(components={"block_pool": part})
    assert engine.config.enable_prefix_caching is False
    assert caplog.text.count("caching is off") == 1
    assert part.__name__ in caplog.text


def test_prefix_caching_asked_for_by_name_refuses_a_pool_that_cannot():
    with pytest.raises(ValueError, match=r"enable_prefix_caching=True needs 'caching', which your block_pool .*Lab04Pool"):
        make_engine(components={"block_pool": Lab04Pool}, enable_prefix_caching=True)


def test_a_manager_without_prefix_caching_switches_it_off():
    assert make_engine(components={"kv_cache_manager": Lab04Manager}).config.enable_prefix_caching is False


def test_a_scheduler_of_whole_prompts_fits_max_model_len_to_its_budget():
    engine = make_engine(components={"scheduler": Lab05Scheduler}, max_num_batched_tokens=32)
    assert (engine.config.max_model_len, engine.config.enable_chunked_prefill) == (32, False)


def test_a_scheduler_of_whole_prompts_needs_a_budget_that_holds_an_explicit_max_model_len():
    with pytest.raises(ValueError, match="max_model_len=64 is larger than max_num_batched_tokens=32"):
        make_engine(components={"scheduler": Lab05Scheduler}, max_num_batched_tokens=32, max_model_len=64)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"enable_chunked_prefill": True}, "enable_chunked_prefill=True needs 'chunking'"),
        ({"long_prefill_token_threshold": 8}, "long_prefill_token_threshold=8 needs 'chunking'"),
        ({"scheduling_policy": "priority"}, "scheduling_policy='priority' needs 'priority'"),
    ],
)
def test_what_was_asked_for_by_name_refuses_a_scheduler_that_cannot(settings: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        make_engine(components={"scheduler": Lab05Scheduler}, **settings)


def test_a_scheduler_without_preemption_needs_a_pool_for_the_worst_case():
    parts = {"scheduler": NoPreemption}
    run(make_engine(1 + 4 * 4, components=parts, max_num_seqs=4, max_num_batched_tokens=24, max_model_len=16))
    with pytest.raises(ValueError, match=r"max_num_seqs=4 .*16 blocks of 4; the KV pool has 15\) needs 'preemption'"):
        make_engine(4 * 4, components=parts, max_num_seqs=4, max_num_batched_tokens=24, max_model_len=16)


def test_a_scheduler_without_stops_refuses_stop_tokens():
    class NoStops(Scheduler):
        capabilities = frozenset({"whole prompts", "preemption", "chunking"})

        def finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
            return FinishReason.LENGTH if request.num_output_tokens >= request.max_tokens else None

    engine = make_engine(components={"scheduler": NoStops})
    with pytest.raises(ValueError, match=r"stop_token_ids=\[7\] needs 'stops'"):
        engine.add_request(make_request("a", 3, stop_token_ids=[7]))
    run(engine)


def test_a_hash_without_salt_refuses_salted_requests_only():
    def hash_block(parent: Any, tokens: Any, extra: Any = ()) -> Any:
        return parent, *tokens

    hash_block.capabilities = frozenset()  # type: ignore[attr-defined]
    engine = make_engine(components={"block_hash": hash_block})
    with pytest.raises(ValueError, match=r"cache_salt='x' needs 'salt', which your block_hash component"):
        engine.add_request(make_request("a", 3, cache_salt="x"))
    with pytest.raises(ValueError, match="lora_digest='d' needs 'salt'"):
        engine.add_request(make_request("a", 3, lora_digest="d"))
    run(engine)


def test_the_config_can_be_settled_before_the_pool_is_known():
    config = EngineConfig(max_num_batched_tokens=32, max_num_seqs=4, block_size=4).resolved("cpu")
    settled = apply_capabilities(config, Components({"scheduler": Lab05Scheduler}))
    assert settled.fit_max_model_len(4096, 101).max_model_len == 32
    assert apply_capabilities(config, Components()) == config
    engine = EngineCore(settled.fit_max_model_len(4096, 101), EchoExecutor(101, 4), Components({"scheduler": Lab05Scheduler}))
    assert engine.config.max_model_len == 32
