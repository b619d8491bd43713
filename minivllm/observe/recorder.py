"""Recorder: fills a Trace while an engine runs. Chosen by `EngineConfig(trace=True)`; without it none of this is imported.
May not know torch, nor how the parts of the engine work inside.

    EngineCore            RecordingEngineCore           Recorder                     Trace
    add_request           the same, then                arrived(...)                 a RequestRecord
    _schedule             timed, then                   planned(step)                a StepRecord: tokens, blocks
    _execute, result      timed
    _update               timed, then                   updated(outputs)             sampled tokens, ends
    abort_requests        the same, then                ended(...)

Everything is read from the messages of a step (core/step.py), which every scheduler must write so that a worker can follow; the
block tables are rebuilt from them by difference. So a student's pool or scheduler is recorded as well as the reference. Only
whether a free block still has cached content, for `evicted`, is looked up in the pool, where the pool knows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from minivllm.components import Components
from minivllm.config import EngineConfig
from minivllm.core.engine_core import EngineCore
from minivllm.core.step import (
    EngineCoreOutput,
    EngineCoreRequest,
    Executor,
    FinishReason,
    SchedulerOutput,
    StepHandle,
    StepOutput,
)
from minivllm.observe.clock import Clock, WallClock
from minivllm.observe.trace import RequestRecord, ScheduledTokens, StepRecord, Trace


class RecordingEngineCore(EngineCore):
    """An EngineCore whose every step is in `trace`. It serves exactly as one that is not watched. `clock` may be replaced while
    no request runs."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        components: Components | None = None,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(config, executor, components, vocab_size)
        self.clock: Clock = WallClock()
        caches = self.config.enable_prefix_caching is not False
        self._recorder = Recorder(self.new_trace(), caches, getattr(self.kv_cache_manager, "block_pool", None))
        self._records: dict[int, StepRecord] = {}  # of the steps in flight, by the id() of their SchedulerOutput

    @property
    def trace(self) -> Trace:
        return self._recorder.trace

    @trace.setter
    def trace(self, trace: Trace) -> None:
        self._recorder.trace = trace

    def new_trace(self) -> Trace:
        """An empty trace of this engine; assign it to `trace` to record into it from now on."""
        config = self.config
        return Trace(
            model=config.model,
            block_size=config.block_size,
            num_blocks=self.executor.num_blocks,
            max_num_batched_tokens=config.max_num_batched_tokens or 0,
            max_num_seqs=config.max_num_seqs or 0,
        )

    def shown_id(self, request_id: str) -> str:
        """The name in the trace of a request that has not ended."""
        return self._recorder.shown_id(request_id)

    # ---------------------------------------------------------------- what is watched

    def add_request(self, request: EngineCoreRequest) -> None:
        super().add_request(request)
        self._recorder.arrived(request, self.clock.now())

    def abort_requests(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> None:
        request_ids = list(request_ids)
        super().abort_requests(request_ids, reason)
        for request_id in request_ids:
            self._recorder.ended(request_id, reason, self.clock.now())

    def reset_prefix_cache(self) -> bool:
        is_reset = super().reset_prefix_cache()
        if is_reset:
            self._recorder.forget_cached_blocks()
        return is_reset

    def _schedule(self) -> SchedulerOutput:
        self._recorder.planning()
        begin = self.clock.now()
        step = super()._schedule()
        seconds = self.clock.now() - begin
        if step.total_num_scheduled_tokens or step.preempted_req_ids:
            self._records[id(step)] = record = self._recorder.planned(step, begin)
            record.schedule_s = seconds
            if not step.total_num_scheduled_tokens:  # it only took blocks away: there is nothing to execute
                self._recorder.closed(self._records.pop(id(step)))
        return step

    def _execute(self, step: SchedulerOutput) -> StepHandle:
        record = self._records[id(step)]
        begin = self.clock.now()
        try:
            self.executor.submit(step)
            if (synchronize := getattr(self.executor, "synchronize", None)) is not None:
                synchronize()  # on a GPU the forward pass has only begun: wait, or sampling would get its time
            self.clock.computed(record)
        finally:
            record.execute_s = self.clock.now() - begin
        begin = self.clock.now()
        handle = self.executor.sample()
        record.sample_s = self.clock.now() - begin
        return _TimedHandle(handle, record, self.clock)

    def _update(self, step: SchedulerOutput, result: StepOutput) -> list[EngineCoreOutput]:
        record = self._records.pop(id(step))
        begin = self.clock.now()
        outputs = super()._update(step, result)
        now = self.clock.now()
        record.update_s = now - begin
        self._recorder.updated(record, result, outputs, now)
        self._recorder.closed(record)
        return outputs

    def _fail_step(self, step: SchedulerOutput, error: BaseException) -> list[EngineCoreOutput]:
        failed = [self._records.pop(id(part)) for part in (step, *(later for later, _ in self._in_flight))]
        outputs = super()._fail_step(step, error)
        for record in failed:
            record.error = f"{type(error).__name__}: {error}"
            self._recorder.closed(record)
        return outputs

    def _end_with_error(self, request_ids: list[str], message: str) -> list[EngineCoreOutput]:
        outputs = super()._end_with_error(request_ids, message)
        for output in outputs:
            self._recorder.ended(output.request_id, FinishReason.ERROR, self.clock.now())
        return outputs


class _TimedHandle:
    """A step in flight; the wait for its tokens counts as sampling."""

    def __init__(self, handle: StepHandle, record: StepRecord, clock: Clock) -> None:
        self._handle, self._record, self._clock = handle, record, clock

    def result(self) -> StepOutput:
        begin = self._clock.now()
        try:
            return self._handle.result()
        finally:
            self._record.sample_s += self._clock.now() - begin


@dataclass(slots=True)
class _Open:
    """A request that has not ended, as the recorder knows it. Times are the clock's: a cleared trace begins anew."""

    shown_id: str
    arrival: float
    num_prompt_tokens: int
    first_token: float | None = None
    num_cached_tokens: int | None = None  # None before the first admission
    num_preemptions: int = 0
    num_known: int = 0  # tokens it had when it was last admitted: up to there it prefills
    num_computed: int = 0


@dataclass(slots=True)
class Recorder:
    """Keeps what the messages of the steps add up to (block tables, who holds what) and writes it into `trace`.

    caches: whether the engine keeps a prefix cache.   block_pool: whose word counts where it has one; None is the tables'.
    """

    trace: Trace
    caches: bool
    block_pool: Any
    _open: dict[str, _Open] = field(default_factory=dict)  # by the engine's id
    _shown_ids: set[str] = field(default_factory=set)  # theirs
    _tables: dict[str, list[int]] = field(default_factory=dict)  # likewise, of those that run
    _num_holders: Counter[int] = field(default_factory=Counter)  # tables each block is in
    _cached_free: set[int] = field(default_factory=set)  # blocks that nobody holds, but a prefix could be found in
    _cached_held: set[int] = field(default_factory=set)  # such that somebody holds, or did before the step was planned

    # ---------------------------------------------------------------- requests

    def arrived(self, request: EngineCoreRequest, now: float) -> None:
        name = shown_id = request.external_req_id or request.request_id
        number = 1
        while shown_id in self.trace.requests or shown_id in self._shown_ids:
            number += 1
            shown_id = f"{name}#{number}"
        self._shown_ids.add(shown_id)
        self._open[request.request_id] = _Open(shown_id, now, len(request.prompt_token_ids))
        self._record_of(request.request_id)

    def shown_id(self, request_id: str) -> str:
        return self._open[request_id].shown_id

    def ended(self, request_id: str, reason: FinishReason, now: float) -> None:
        """A request is gone, with its blocks; between two steps, that belongs to the one before. Unknown ids are skipped."""
        if request_id not in self._open:
            return
        record = self._record_of(request_id)
        record.finish, record.finish_reason = now - self._origin(now), reason.value
        freed = self._gone(request_id)
        if self.trace.steps:
            last = self.trace.steps[-1]
            last.finished.append(record.request_id)
            last.freed += freed
            self.closed(last)

    def _gone(self, request_id: str) -> list[int]:
        """Forget a request; returns the blocks that nobody holds any more."""
        self._shown_ids.discard(self._open.pop(request_id).shown_id)
        freed = self._drop_table(request_id)
        self._note_cached(freed)
        return freed

    def _record_of(self, request_id: str) -> RequestRecord:
        """The request's entry in the trace, made anew if the trace was cleared since."""
        known = self._open[request_id]
        record = self.trace.requests.get(known.shown_id)
        if record is None:
            origin = self._origin(known.arrival)
            record = self.trace.requests[known.shown_id] = RequestRecord(
                request_id=known.shown_id,
                arrival=known.arrival - origin,
                first_token=None if known.first_token is None else known.first_token - origin,
                num_prompt_tokens=known.num_prompt_tokens,
                num_cached_tokens=known.num_cached_tokens or 0,
                num_preemptions=known.num_preemptions,
            )
        return record

    def _origin(self, now: float) -> float:
        """When the trace began, on the clock; it begins with the first thing that is recorded."""
        if self.trace.origin is None:
            self.trace.origin = now
        return self.trace.origin

    # ---------------------------------------------------------------- steps

    def planning(self) -> None:
        """A step is about to be scheduled. Where the pool runs short somebody may give way, and another get the blocks at once:
        afterwards nobody could tell what they had cached."""
        self._cached_held.clear()
        at_most = self.trace.max_num_batched_tokens // max(self.trace.block_size, 1) + len(self._tables)  # blocks of a step
        if self.block_pool is not None and self.block_pool.num_free_blocks <= at_most:
            self._cached_held.update(filter(self._is_cached, self._num_holders))

    def planned(self, step: SchedulerOutput, begin: float) -> StepRecord:
        """A step was scheduled: who computes what, and which blocks moved."""
        record = StepRecord(index=len(self.trace.steps), start=begin - self._origin(begin))
        self.trace.steps.append(record)
        for request_id in step.preempted_req_ids:
            self._preempted(request_id, record)
        lost = self._cached_held.intersection(record.freed)  # cached blocks that may have been handed out again at once
        for new in step.scheduled_new_reqs:
            known = self._open[new.req_id]
            known.num_known, known.num_computed = len(new.token_ids), new.num_computed_tokens
            if known.num_cached_tokens is None:
                known.num_cached_tokens = self._record_of(new.req_id).num_cached_tokens = new.num_computed_tokens
            record.cached_tokens[known.shown_id] = new.num_computed_tokens
            self._tables[new.req_id] = []
            num_hits = new.num_computed_tokens // self.trace.block_size if self.trace.block_size else 0
            self._hold(new.req_id, new.block_ids[:num_hits], record)
            self._hold(new.req_id, new.block_ids[num_hits:], record, lost)
        cached = step.scheduled_cached_reqs
        for request_id, block_ids, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self._open[request_id].num_computed = num_computed
            self._hold(request_id, block_ids, record, lost)
        for request_id, n in step.num_scheduled_tokens.items():
            record.tokens[self.shown_id(request_id)] = self._scheduled(request_id, n, step)
        self._note_cached(record.freed)
        return record

    def _scheduled(self, request_id: str, n: int, step: SchedulerOutput) -> ScheduledTokens:
        known = self._open[request_id]
        start, known.num_computed = known.num_computed, known.num_computed + n
        return ScheduledTokens(
            num_computed=start,
            num_tokens=n,
            num_prefill=max(0, min(start + n, known.num_known) - start),
            num_drafts=len(step.scheduled_spec_decode_tokens.get(request_id, ())),
        )

    def _preempted(self, request_id: str, record: StepRecord) -> None:
        known = self._open[request_id]
        known.num_preemptions += 1
        self._record_of(request_id).num_preemptions = known.num_preemptions
        record.preempted.append(known.shown_id)
        record.freed += self._drop_table(request_id)

    def updated(self, record: StepRecord, result: StepOutput, outputs: Iterable[EngineCoreOutput], now: float) -> None:
        """A step's tokens have come back."""
        time = now - self._origin(now)
        for output in outputs:
            if (known := self._open.get(output.request_id)) is None:
                continue
            request = self._record_of(output.request_id)
            if output.new_token_ids:
                record.sampled[known.shown_id] = list(output.new_token_ids)
                request.token_times += [time] * len(output.new_token_ids)
                if known.first_token is None:
                    known.first_token, request.first_token = now, time
            if (tokens := record.tokens.get(known.shown_id)) is not None and tokens.num_drafts:
                tokens.num_accepted = max(0, len(result.sampled_token_ids.get(output.request_id, ())) - 1)
                known.num_computed -= tokens.num_drafts - tokens.num_accepted
            if output.finish_reason is not None:
                request.finish, request.finish_reason = time, output.finish_reason.value
                record.finished.append(known.shown_id)
                record.freed += self._gone(output.request_id)

    def closed(self, record: StepRecord) -> None:
        """Write down what holds after the step."""
        record.blocks = {self.shown_id(request_id): list(table) for request_id, table in self._tables.items()}
        record.num_running = len(self._tables)
        record.num_waiting = len(self._open) - len(self._tables)
        if self.block_pool is not None:
            record.num_free_blocks = self.block_pool.num_free_blocks
        else:
            record.num_free_blocks = self.trace.num_blocks - 1 - len(self._num_holders)

    # ---------------------------------------------------------------- blocks

    def _hold(self, request_id: str, block_ids: Iterable[int], record: StepRecord, lost: Iterable[int] | None = None) -> None:
        """Append blocks to a table. With `lost` they are newly allocated: what they cached, or those in `lost` did, is gone."""
        for block_id in block_ids:
            self._tables[request_id].append(block_id)
            if not self._num_holders[block_id]:
                record.taken.append(block_id)
                if lost is not None and (block_id in self._cached_free or block_id in lost):
                    record.evicted.append(block_id)
                self._cached_free.discard(block_id)
            self._num_holders[block_id] += 1

    def _drop_table(self, request_id: str) -> list[int]:
        """Forget a table; returns the blocks that nobody holds now, tail first, as they are freed."""
        freed = []
        for block_id in reversed(self._tables.pop(request_id, [])):
            self._num_holders[block_id] -= 1
            if not self._num_holders[block_id]:
                del self._num_holders[block_id]
                freed.append(block_id)
        return freed

    def _note_cached(self, freed: Iterable[int]) -> None:
        """Remember which free blocks a prefix can still be found in."""
        self._cached_free.update(i for i in freed if not self._num_holders[i] and self._is_cached(i))

    def _is_cached(self, block_id: int) -> bool:
        """Whether a prefix can be found in a block. A pool without a prefix cache keeps no hashes, or no list of blocks."""
        blocks = getattr(self.block_pool, "blocks", None) if self.caches else None
        return blocks is not None and getattr(blocks[block_id], "block_hash", None) is not None

    def forget_cached_blocks(self) -> None:
        self._cached_free.clear()
