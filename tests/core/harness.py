"""What the tests of the core share: engines over the echo model, and the invariants that hold after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hypothesis import settings

from minivllm.components import Components
from minivllm.config import EngineConfig
from minivllm.core.engine_core import EngineCore
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.radix_cache import RadixCache, RadixNode
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.core.step import EngineCoreRequest, FinishReason, SchedulerOutput
from minivllm.sampling_params import SamplingParams
from minivllm.sim.echo import DeferredExecutor, EchoExecutor, echo_generate

EOS = (1,)
VOCAB = 1000  # so large that no request ends by chance, unless a test wants it
DEFAULTS: dict[str, Any] = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}


def examples(at_least: int) -> int:
    """How many a search makes: `at_least`, or the profile's where that has more; under `make check` a fifth."""
    n = settings().max_examples
    return max(at_least, n) if n >= settings.get_profile("ci").max_examples else at_least // 5


def make_engine(
    num_blocks: int = 101,
    *,
    components: dict[str, Any] | None = None,
    echo: dict[str, Any] | None = None,
    deferred: bool = False,
    **config: Any,
) -> EngineCore:
    """An engine with blocks of 4 (unless told otherwise) over the echo model. `num_blocks` includes the null block."""
    config = {**DEFAULTS, **config}
    if config.get("enable_prefix_caching") is False:
        config.pop("prefix_cache", None)
    executor: Any = EchoExecutor(num_blocks, config["block_size"], **{"vocab_size": VOCAB, **(echo or {})})
    vocab_size = executor.vocab_size
    if deferred:
        executor = DeferredExecutor(executor)
    return EngineCore(EngineConfig(**config).resolved("cpu"), executor, Components(components), vocab_size=vocab_size)


def core_request(tokens: list[int] | int, name: str = "r", **fields: Any) -> Request:
    """A request as the scheduler has it. tokens: of its prompt, or how many, 0 and up."""
    return Request(name, list(range(tokens)) if isinstance(tokens, int) else tokens, SamplingParams(), max_tokens=16, **fields)


def compute(manager: KVCacheManager, request: Request, n: int) -> list[int] | None:
    """Allocate for n tokens and let the step come back; returns the ids of the new blocks."""
    hits, num_cached = manager.get_computed_blocks(request) if request.num_computed_tokens == 0 else ([], 0)
    blocks = manager.allocate_slots(request, n, hits)
    if blocks is None:
        return None
    request.num_computed_tokens += num_cached + n
    return [block.block_id for block in blocks]


def make_request(
    request_id: str,
    prompt: list[int] | int,
    max_tokens: int | None = 4,
    *,
    priority: int = 0,
    arrival_time: float = 0.0,
    cache_salt: str | None = None,
    lora_digest: str | None = None,
    skip_reading_prefix_cache: bool = False,
    eos_token_ids: tuple[int, ...] = EOS,
    **params: Any,
) -> EngineCoreRequest:
    """A request; an integer prompt of n is n tokens that no other request shares."""
    if isinstance(prompt, int):
        prompt = [(sum(map(ord, request_id)) * 17 + 31 * i) % 900 + 50 for i in range(prompt)]
    return EngineCoreRequest(
        request_id,
        prompt,
        SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **params}),
        eos_token_ids=eos_token_ids,
        priority=priority,
        arrival_time=arrival_time,
        cache_salt=cache_salt,
        lora_digest=lora_digest,
        skip_reading_prefix_cache=skip_reading_prefix_cache,
    )


def oracle(engine: EngineCore, request: EngineCoreRequest) -> tuple[list[int], FinishReason, int | None]:
    """What the echo model answers with no engine in between."""
    assert engine.config.max_model_len is not None
    return echo_generate(
        request.prompt_token_ids,
        request.sampling_params,
        max_model_len=engine.config.max_model_len,
        eos_token_ids=request.eos_token_ids,
        vocab_size=echo_of(engine).vocab_size,
    )


def echo_of(engine: EngineCore) -> EchoExecutor:
    executor = engine.executor
    return executor.inner if isinstance(executor, DeferredExecutor) else executor  # type: ignore[return-value]


class AheadScheduler(Scheduler):
    """Asynchronous scheduling in its smallest form: a step counts the token it will sample as if it were known, so that
    the next step can be scheduled before it is."""

    def after_schedule(self, step: SchedulerOutput) -> None:
        super().after_schedule(step)
        for req_id in step.num_scheduled_tokens:
            request = self.requests[req_id]
            if request.num_computed_tokens == request.num_tokens + request.num_output_placeholders:
                request.num_output_placeholders += 1


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None


class Driver:
    """Runs an engine step by step, watches each step, and gathers the answers. Errors are failures unless `expect_errors`."""

    def __init__(self, engine: EngineCore, expect_errors: bool = False) -> None:
        self.engine = engine
        self.expect_errors = expect_errors
        self.answers: dict[str, Answer] = {}
        self.steps: list[SchedulerOutput] = []  # those that computed something
        self.num_begun = 0
        self.num_preemptions = 0
        self._named: dict[Hashable, tuple[int, ...]] = {}  # block hash -> tokens of the block
        schedule = engine.scheduler.schedule

        def watched() -> SchedulerOutput:
            step: SchedulerOutput = schedule()
            check_step(engine, step)
            self.num_preemptions += len(step.preempted_req_ids)
            self.last = step
            if step.total_num_scheduled_tokens:
                self.steps.append(step)
            return step

        engine.scheduler.schedule = watched

    def add(self, *requests: EngineCoreRequest) -> None:
        for request in requests:
            self.engine.add_request(request)
            self.answers[request.request_id] = Answer()

    def begin(self) -> bool:
        self.num_begun += 1
        sent = self.engine.begin_step()
        self.check(kv=False)  # the step may be about to fail
        return sent

    def end(self) -> None:
        for output in self.engine.end_step():
            assert self.expect_errors or output.error is None, output.error
            answer = self.answers[output.request_id]
            assert answer.finish_reason is None, "news of a request that has ended"
            answer.token_ids += output.new_token_ids
            answer.finish_reason, answer.stop_reason = output.finish_reason, output.stop_reason
            answer.num_cached_tokens, answer.error = output.num_cached_tokens, output.error
        self.check(kv=True)

    def step(self) -> SchedulerOutput:
        """One step; returns what it was."""
        self.begin()
        self.end()
        return self.last

    def run(self, max_steps: int = 2000) -> dict[str, Answer]:
        """Until every request has ended."""
        for _ in range(max_steps):
            if not self.engine.has_unfinished_requests():
                check_all_free(self.engine)
                return self.answers
            self.step()
        raise AssertionError(f"no end after {max_steps} steps: {list(self.engine.scheduler.requests)}")

    def check(self, kv: bool) -> None:
        check_invariants(self.engine)
        size = self.engine.config.block_size
        for request in self.engine.scheduler.requests.values():
            for i, block_hash in enumerate(request.block_hashes):
                self._named[block_hash] = tuple(request.all_token_ids[i * size : (i + 1) * size])
        if kv and not isinstance(self.engine.executor, DeferredExecutor):
            check_cached_blocks(self.engine, self._named)


def generate(engine: EngineCore, *requests: EngineCoreRequest) -> dict[str, Answer]:
    driver = Driver(engine)
    driver.add(*requests)
    return driver.run()


def check_step(engine: EngineCore, step: SchedulerOutput) -> None:
    """A step keeps every limit, and what it says of its requests adds up."""
    config, counts = engine.config, step.num_scheduled_tokens
    assert config.max_num_batched_tokens is not None and config.max_num_seqs is not None
    assert step.total_num_scheduled_tokens == sum(counts.values()) <= config.max_num_batched_tokens
    assert len(counts) <= config.max_num_seqs
    assert all(n >= 1 for n in counts.values())
    assert not set(step.preempted_req_ids) & set(counts), "a victim is still in the step"
    cached = step.scheduled_cached_reqs
    assert len(cached.req_ids) == len(cached.new_block_ids) == len(cached.num_computed_tokens)
    assert sorted([new.req_id for new in step.scheduled_new_reqs] + cached.req_ids) == sorted(counts)
    for req_id, drafts in step.scheduled_spec_decode_tokens.items():
        assert 0 < len(drafts) < counts[req_id], "drafts without the token before them"
    if step.total_num_scheduled_tokens == 0 and engine.scheduler.requests and not engine._in_flight:
        assert step.preempted_req_ids, "nothing to do and nobody preempted: the engine would spin"


def check_invariants(engine: EngineCore) -> None:
    """What holds between any two calls of an engine made of the reference parts."""
    scheduler = engine.scheduler
    manager = scheduler.kv_cache_manager
    pool, size = manager.block_pool, engine.config.block_size
    requests: dict[str, Request] = scheduler.requests

    # Every request is in one queue; only running ones hold blocks.
    assert len(scheduler.running) <= engine.config.max_num_seqs
    queued = Counter([r.request_id for r in scheduler.running] + [r.request_id for r in scheduler.waiting])
    assert queued == Counter(list(requests)), "the queues and the requests differ"
    assert set(manager.req_to_blocks) == {r.request_id for r in scheduler.running}
    for request in requests.values():
        is_running = request.status is RequestStatus.RUNNING
        assert is_running == (request in scheduler.running)
        table = manager.req_to_blocks.get(request.request_id, [])
        assert request.num_tokens < engine.config.max_model_len
        assert len(request.block_hashes) <= request.num_tokens // size
        assert request.num_in_flight_tokens >= 0
        if is_running:
            assert 0 < request.num_computed_tokens <= min(len(table) * size, engine.config.max_model_len - 1)
        else:
            assert request.num_computed_tokens == request.num_published_blocks == 0 and not request.spec_token_ids

    # Reference counts are the tables'; a block in two tables holds the same prefix in both.
    holders: dict[int, list[tuple[Request, int]]] = {}
    for req_id, table in manager.req_to_blocks.items():
        for index, block in enumerate(table):
            holders.setdefault(block.block_id, []).append((requests[req_id], index))
    for block in pool.blocks:
        assert block.ref_cnt == len(holders.get(block.block_id, ())), f"block {block.block_id}: wrong ref_cnt"
    for block_id, held in holders.items():
        assert block_id != 0, "the null block is in a table"
        prefixes = {(i, tuple(r.all_token_ids[: (i + 1) * size]), r.cache_salt, r.lora_digest) for r, i in held}
        assert len(prefixes) == 1, f"block {block_id} is held for different prefixes"
        assert len(held) == 1 or len(next(iter(prefixes))[1]) % size == 0, f"block {block_id} is shared but not full"

    # The free list is exactly the blocks nobody holds, linked both ways.
    free = list(pool.free_block_queue)
    assert len(free) == pool.num_free_blocks
    assert {b.block_id for b in free} == {b.block_id for b in pool.blocks if b.ref_cnt == 0} - {0}
    for before, after in pairwise(free):
        assert before.next_free_block is after and after.prev_free_block is before

    # What can be found: the map and the blocks agree, and a table's published blocks say what they hold.
    assert {h: b.block_id for h, b in pool.cached_block_hash_to_block.items()} == {
        b.block_hash: b.block_id for b in pool.blocks if b.block_hash is not None
    }
    if (tree := getattr(manager, "radix_cache", None)) is not None:
        check_tree(engine, tree)
        return
    for req_id, table in manager.req_to_blocks.items():
        request = requests[req_id]
        for index, block in enumerate(table):
            if block.block_hash is not None:
                assert index < request.num_published_blocks and block.block_hash == request.block_hashes[index]


def path_of(node: RadixNode) -> list[RadixNode]:
    """From the root's child down to the node."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def check_tree(engine: EngineCore, tree: RadixCache) -> None:
    """The radix cache's share: its links, its blocks are the pool's cached ones, and no block can be evicted before one that
    hangs on it."""
    manager = engine.scheduler.kv_cache_manager
    order = {block.block_id: place for place, block in enumerate(manager.block_pool.free_block_queue)}
    found = []
    for node in tree:
        assert node.parent is not None and node.parent.children[node.keys[0]] is node
        assert len(node.keys) == len(node.blocks) > 0
        assert node.start == sum(len(above.blocks) for above in path_of(node)[:-1])
        above = [block for other in path_of(node)[:-1] for block in other.blocks]
        for block in node.blocks:
            if above:
                before, after = (order.get(b.block_id, 1 << 30) for b in (block, above[-1]))
                assert before < after or before == after == 1 << 30, f"block {above[-1].block_id} would be evicted too soon"
            above.append(block)
        found += node.blocks
    cached = manager.block_pool.cached_block_hash_to_block.values()
    assert sorted(b.block_id for b in found) == sorted(b.block_id for b in cached) and len(tree) == len(found)
    for req_id, table in manager.req_to_blocks.items():
        request = engine.scheduler.requests[req_id]
        published = table[: request.num_published_blocks]
        if published and published[-1] in tree:  # else it was taken back, with what it hung on
            path = path_of(tree._node_of[published[-1].block_id])
            assert [b for node in path for b in node.blocks][: len(published)] == published
            assert [k for node in path for k in node.keys][: len(published)] == request.block_hashes[: len(published)]


def check_cached_blocks(engine: EngineCore, tokens_of: dict[Hashable, tuple[int, ...]]) -> None:
    """Whatever can be found in the prefix cache is in the KV cache."""
    kv, size = echo_of(engine).kv_cache, engine.config.block_size
    for node in getattr(engine.scheduler.kv_cache_manager, "radix_cache", ()):
        for (_, tokens), block in zip(node.keys, node.blocks, strict=True):
            content = tuple(kv[block.block_id * size : (block.block_id + 1) * size])
            assert content == tokens, f"block {block.block_id} stands in the tree for {tokens} but holds {content}"
    if engine.config.prefix_cache == "radix":
        return
    for block_hash, block in engine.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block.items():
        content = tuple(kv[block.block_id * size : (block.block_id + 1) * size])
        assert content == tokens_of[block_hash], f"block {block.block_id} is published but holds {content}"


def check_all_free(engine: EngineCore) -> None:
    """After the last request every block but the null block is free."""
    manager = engine.scheduler.kv_cache_manager
    assert manager.block_pool.num_free_blocks == engine.executor.num_blocks - 1
    assert not manager.req_to_blocks and not engine.scheduler.running and not len(engine.scheduler.waiting)
