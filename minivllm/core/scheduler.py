"""Scheduler: which requests compute which tokens in the next step, and what becomes of the tokens that come back.
Built in Lab 05 (`finish_reason`, `schedule` for whole prompts, `pick_victim`, `preempt`) and Lab 06 (`num_new_tokens`,
`schedule` unified). May not know token text, tensors, or torch.

    add_request -> waiting --admit--> running --finish--> gone
                      ^                  |
                      '----- preempt ----'     blocks taken, outputs kept: it computes its tokens again, cached ones excepted

`schedule()` and `update_from_output()` alternate. More steps may be scheduled before the first comes back (see
`after_schedule`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from minivllm.config import EngineConfig
from minivllm.core.block_pool import KVCacheBlock
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.request import Request, RequestStatus
from minivllm.core.request_queue import create_request_queue
from minivllm.core.step import EngineCoreOutput, FinishReason, NewRequestData, SchedulerOutput, StepOutput


class Scheduler:
    """`config` must be resolved and its max_model_len fitted to the pool. `num_lookahead_tokens`: slots a drafter needs
    beyond a step's own tokens.

    A replacement needs `requests`, `add_request`, `schedule`, `update_from_output`, `requests_in` and `finish_requests`.
    """

    capabilities = frozenset(
        {"stops", "whole prompts", "preemption", "chunking", "mixed batches", "priority", "longest prefix"}
    )

    def __init__(self, config: EngineConfig, kv_cache_manager: KVCacheManager, num_lookahead_tokens: int = 0) -> None:
        if config.max_num_batched_tokens is None or config.max_num_seqs is None or config.max_model_len is None:
            raise ValueError("Scheduler needs a settled config: call EngineConfig.resolved() and .fit_max_model_len() first.")
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_num_seqs = config.max_num_seqs
        self.max_model_len = config.max_model_len
        self.long_prefill_token_threshold = config.long_prefill_token_threshold
        self.chunked_prefill = config.enable_chunked_prefill is not False
        self.prefix_caching = config.enable_prefix_caching is not False
        self.policy = config.scheduling_policy
        self.num_lookahead_tokens = num_lookahead_tokens
        self.kv_cache_manager = kv_cache_manager

        self.requests: dict[str, Request] = {}  # all that are not finished
        self.waiting = create_request_queue(self.policy, lambda request: kv_cache_manager.get_computed_blocks(request)[1])
        self.running: list[Request] = []
        self._set_aside: list[Request] = []  # blocked, while a step is planned
        self.finished_req_ids: list[str] = []  # since the last step, and
        self.preempted_req_ids: list[str] = []  # likewise: the worker drops them
        self.next_step_id = 0
        self.num_requests_seen = 0

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises ValueError if one with its id is not finished yet."""
        if request.request_id in self.requests:
            raise ValueError(f"Request id {request.request_id!r} is in use: wait until it ends, abort it, or choose another.")
        request.arrival_index, request.arrival_step = self.num_requests_seen, self.next_step_id
        self.num_requests_seen += 1
        self.requests[request.request_id] = request
        self.waiting.add(request)

    # ---------------------------------------------------------------- before the step

    def schedule(self) -> SchedulerOutput:
        """Plan the next step.

        There is no prefill phase and no decode phase. Every request has num_computed_tokens, chasing
        num_tokens_with_spec; a step gives each as many of the tokens it lacks as one budget, max_num_batched_tokens,
        still holds. A decode lacks one token, a verified draft a few, a prompt many, a prompt after a cache hit or a
        preemption some: one rule covers all.

        1. RUNNING, in order. Where the pool has no room, victims give way, last served first; a request that is its own
           victim ends the loop. The one served first is never a victim beside others, so some request always moves on.
        2. WAITING, in order, if nobody had to give way. The first that does not fit ends the loop: no overtaking, so a
           long prompt is not starved by short ones.
        """
        step = self.open_step()
        for request in self.running_in_order():
            n = self.num_new_tokens(request, self.budget_left(step))
            if n > 0 and not self.advance(step, request, n):  # n == 0: its token is in flight, and the next one's may not be
                break
        while (head := self.next_in_line()) is not None:
            hits, num_cached_tokens = self.kv_cache_manager.get_computed_blocks(head)
            n = self.num_new_tokens(head, self.budget_left(step), num_cached_tokens)
            if n == 0 or not self.admit(step, head, n, hits, num_cached_tokens):
                break
        return self.close_step(step)

    def num_new_tokens(self, request: Request, budget: int, num_cached_tokens: int = 0) -> int:
        """How many tokens the request computes in this step: all it lacks, within the budget; 0 is "not in this step".

        `num_cached_tokens`: found in the prefix cache just now, for a waiting request (whose own count is 0).
        """
        num_computed = request.num_computed_tokens + num_cached_tokens
        n = request.num_tokens_with_spec + request.num_output_placeholders - num_computed
        if 0 < self.long_prefill_token_threshold < n and len(self.requests) > 1:  # alone, nobody is kept waiting by it
            n = self.long_prefill_token_threshold
        n = min(n, self.max_model_len - 1 - num_computed)  # the last position is sampled, never computed
        if not self.chunked_prefill and request.num_tokens - num_computed > budget:
            return 0  # a prompt goes in whole or not at all
        return min(n, budget)

    def can_admit(self, request: Request, computed_blocks: Sequence[KVCacheBlock]) -> bool:
        """Whether a waiting request may start: only with room for *all* its tokens, though a chunk would need less now.
        Else two long prompts would start on half the pool each and preempt one another."""
        return self.kv_cache_manager.has_room(request, request.num_tokens, computed_blocks)

    def is_blocked(self, request: Request) -> bool:
        """Whether a waiting request cannot start whatever room there is. Preempted while in flight, it waits for its tokens."""
        return request.num_in_flight_tokens > 0

    def pick_victim(self) -> Request:
        """Who gives its blocks back: the one we would have served last."""
        if self.policy == "priority":
            return max(self.running, key=lambda request: request.sort_key)
        return self.running[-1]

    def preempt(self, request: Request) -> None:
        """Back to waiting: first in line if FCFS, where its priority puts it otherwise. Its tokens stay, their KV goes."""
        self.kv_cache_manager.free(request)
        self.running.remove(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        self.preempted_req_ids.append(request.request_id)
        self.waiting.prepend(request)

    def after_schedule(self, step: SchedulerOutput) -> None:
        """Count the step's tokens as computed, now: the next step can be scheduled while this one is in flight. (One
        that does so also counts the tokens this step will sample: `num_output_placeholders`.)"""
        for req_id, n in step.num_scheduled_tokens.items():
            request = self.requests[req_id]
            request.num_computed_tokens += n
            request.num_in_flight_tokens += n

    # ---------------------------------------------------------------- what a `schedule` is written with

    def open_step(self) -> SchedulerOutput:
        """A step with nobody in it yet."""
        step = SchedulerOutput(step_id=self.next_step_id)
        self.next_step_id += 1
        return step

    def close_step(self, step: SchedulerOutput) -> SchedulerOutput:
        """The step as the worker gets it: with who left since the last one, and its tokens counted."""
        for request in reversed(self._set_aside):
            self.waiting.prepend(request)
        self._set_aside = []
        step.finished_req_ids, self.finished_req_ids = self.finished_req_ids, []
        step.preempted_req_ids, self.preempted_req_ids = self.preempted_req_ids, []
        self.after_schedule(step)
        return step

    def budget_left(self, step: SchedulerOutput) -> int:
        """Tokens the step may still compute. (A victim that is taken out of it gives its own back.)"""
        return self.max_num_batched_tokens - step.total_num_scheduled_tokens

    def running_in_order(self) -> Iterator[Request]:
        """Those who run, first served first; one that gives way meanwhile is passed over."""
        for request in tuple(self.running):  # a copy: preemption changes the list
            if request.status is RequestStatus.RUNNING:
                yield request

    def next_in_line(self) -> Request | None:
        """The waiting request whose turn it is, still in the queue. None where nobody may start: max_num_seqs run, somebody
        has just had to give way, or nobody waits. One that is blocked is set aside until the step is closed: what it waits
        for is not room, so those behind it may overtake."""
        if len(self.running) >= self.max_num_seqs or self.preempted_req_ids:
            return None
        while self.waiting:
            request = self.waiting.peek()
            if not self.is_blocked(request):
                return request
            self._set_aside.append(self.waiting.pop())
        return None

    def advance(self, step: SchedulerOutput, request: Request, n: int) -> bool:
        """Put a running request's next n tokens into the step, whoever must give way for them. False if that was the request
        itself: then it is not running any more."""
        while (new_blocks := self._allocate(request, n)) is None:
            victim = self.pick_victim()
            self._unschedule(step, victim)
            self.preempt(victim)
            if victim is request:
                return False
        self._add_running(step, request, n, new_blocks)
        return True

    def admit(
        self,
        step: SchedulerOutput,
        request: Request,
        n: int,
        hits: Sequence[KVCacheBlock] = (),
        num_cached_tokens: int = 0,
    ) -> bool:
        """waiting -> running, with its first n tokens, on top of the blocks found in the prefix cache. False, and nothing
        changed, if there is no room. The worker is told everything: it does not know the request, or has dropped it."""
        if not self.can_admit(request, hits) or self._allocate(request, n, hits) is None:
            return False
        if (head := self.waiting.pop()) is not request:
            self.waiting.prepend(head)
            raise ValueError(f"admit() got {request.request_id!r}; {head.request_id!r} is next in line. Nobody overtakes.")
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_cached_tokens
        if request.num_cached_tokens < 0:  # a later admission would count the request's own blocks as a cache hit
            request.num_cached_tokens = num_cached_tokens
        step.num_scheduled_tokens[request.request_id] = n
        step.total_num_scheduled_tokens += n
        step.scheduled_new_reqs.append(
            NewRequestData(
                req_id=request.request_id,
                token_ids=list(request.all_token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling_params=request.sampling_params,
                seed=request.seed,
                eos_token_ids=request.worker_eos_ids,
                block_ids=self.kv_cache_manager.get_block_ids(request),
                num_computed_tokens=num_cached_tokens,
            )
        )
        return True

    def _allocate(self, request: Request, n: int, hits: Sequence[KVCacheBlock] = ()) -> list[KVCacheBlock] | None:
        if not hits and self.num_lookahead_tokens == 0:
            return self.kv_cache_manager.allocate_slots(request, n)
        if not hits and not self.prefix_caching:
            # All that a manager without prefix caching has to understand; nothing is published, so more tokens are more slots.
            room = self.max_model_len - request.num_computed_tokens - n
            return self.kv_cache_manager.allocate_slots(request, n + min(self.num_lookahead_tokens, room))
        return self.kv_cache_manager.allocate_slots(request, n, hits, self.num_lookahead_tokens)

    def _add_running(self, step: SchedulerOutput, request: Request, n: int, new_blocks: list[KVCacheBlock]) -> None:
        req_id = request.request_id
        step.num_scheduled_tokens[req_id] = n
        step.total_num_scheduled_tokens += n
        if request.spec_token_ids:
            num_drafts = request.num_computed_tokens + n - request.num_tokens
            if num_drafts > 0:  # fewer than proposed where a limit cut n
                step.scheduled_spec_decode_tokens[req_id] = request.spec_token_ids[:num_drafts]
            request.spec_token_ids = []
        cached = step.scheduled_cached_reqs
        cached.req_ids.append(req_id)
        cached.new_block_ids.append([block.block_id for block in new_blocks] if new_blocks else [])
        cached.num_computed_tokens.append(request.num_computed_tokens)

    def _unschedule(self, step: SchedulerOutput, request: Request) -> None:
        """Take a victim out of the step that is being planned, if it was in: its budget is free again. (FCFS never
        needs it: its victims stand behind. The blocks, and the hashes published a moment ago, go in `preempt`.)"""
        req_id = request.request_id
        step.total_num_scheduled_tokens -= step.num_scheduled_tokens.pop(req_id, 0)
        step.scheduled_spec_decode_tokens.pop(req_id, None)
        cached = step.scheduled_cached_reqs
        if req_id in cached.req_ids:
            i = cached.req_ids.index(req_id)
            del cached.req_ids[i], cached.new_block_ids[i], cached.num_computed_tokens[i]

    # ---------------------------------------------------------------- after the step

    def update_from_output(self, step: SchedulerOutput, result: StepOutput) -> list[EngineCoreOutput]:
        """Take in what a step computed. Returns news of each request that gained tokens or ended."""
        outputs: list[EngineCoreOutput] = []
        errors = result.errors
        for request in self.requests_in(step):
            if errors and (error := errors.get(request.request_id)) is not None:
                self._end(request, FinishReason.ERROR)  # its tokens of this step still count as in flight: their hashes go
                outputs.append(EngineCoreOutput(request.request_id, finish_reason=FinishReason.ERROR, error=error))
            elif (output := self.apply_output(request, step, result)) is not None:
                outputs.append(output)
        self._drop_finished_from_running()
        return outputs

    def requests_in(self, step: SchedulerOutput) -> Iterator[Request]:
        """The requests of a step that are still here. One that was aborted since is not, even if its id was taken by
        another."""
        for req_id in step.num_scheduled_tokens:
            request = self.requests.get(req_id)
            if request is not None and request.arrival_step <= step.step_id:
                yield request

    def apply_output(self, request: Request, step: SchedulerOutput, result: StepOutput) -> EngineCoreOutput | None:
        """Give a request its tokens of one step. None for a prefill chunk: there is nothing to tell."""
        req_id = request.request_id
        request.num_in_flight_tokens -= step.num_scheduled_tokens[req_id]
        tokens = result.sampled_token_ids.get(req_id, [])
        if (drafts := step.scheduled_spec_decode_tokens.get(req_id)) and request.num_computed_tokens > 0:
            num_rejected = len(drafts) + 1 - len(tokens)
            request.num_computed_tokens -= num_rejected  # preempted since, there would be nothing to take it from
        if request.num_output_placeholders:
            request.num_output_placeholders -= len(tokens)
        if not tokens:
            return None

        reason = None
        num_accepted = 0
        while num_accepted < len(tokens) and reason is None:  # one at a time: drafts may run past the end
            request.all_token_ids.append(tokens[num_accepted])
            reason = self.finish_reason(request, tokens[num_accepted])
            num_accepted += 1
        logprobs = result.logprobs.get(req_id)
        output = EngineCoreOutput(
            req_id,
            new_token_ids=tokens[:num_accepted],
            new_logprobs=None if logprobs is None else logprobs[:num_accepted],
            prompt_logprobs=result.prompt_logprobs.get(req_id),
            num_cached_tokens=request.num_cached_tokens,
        )
        if reason is None and request.status is RequestStatus.RUNNING:
            drafts = result.draft_token_ids.get(req_id)
            request.spec_token_ids = self.drafts_to_verify(request, drafts) if drafts else []
        if reason is not None:
            if reason is FinishReason.STOP and tokens[num_accepted - 1] not in request.stop_eos_ids:
                request.stop_reason = tokens[num_accepted - 1]
            self._end(request, reason)
            output.finish_reason, output.stop_reason = reason, request.stop_reason
        return output

    def drafts_to_verify(self, request: Request, drafts: list[int]) -> list[int]:
        """What is worth verifying: not more than the request may still have beside its own next token, nor more than the
        budget has for each when all who run verify as many. Else the first in line would leave nothing for the last."""
        own_limit = request.max_tokens - request.num_output_tokens - 1
        fair_share = self.max_num_batched_tokens // max(1, len(self.running)) - 1
        return drafts[: max(0, min(own_limit, fair_share))]

    def finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        """Whether the request ends with `token_id`, which it has just been given, and why. (min_tokens needs no word here: the
        sampler masks the end tokens until then.)"""
        if token_id in request.stop_eos_ids:
            return FinishReason.STOP
        if token_id in request.stop_token_ids:
            return FinishReason.STOP
        if request.num_output_tokens >= request.max_tokens:
            return FinishReason.LENGTH
        return None

    # ---------------------------------------------------------------- ends

    def finish_requests(self, request_ids: Iterable[str], reason: FinishReason) -> list[Request]:
        """End requests from outside (aborted, or their step failed), at any moment, also while in flight: what a step
        still brings for them is ignored. Ids that are not here are skipped. Returns those that ended."""
        ended = [self.requests[req_id] for req_id in dict.fromkeys(request_ids) if req_id in self.requests]
        for request in ended:
            self._end(request, reason)
        self._drop_finished_from_running()
        return ended

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.status is not RequestStatus.RUNNING:
            self.waiting.remove(request)
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        del self.requests[request.request_id]
        self.finished_req_ids.append(request.request_id)
        self.kv_cache_manager.free(request)  # last: should a replaced part fail here, the request is gone all the same

    def _drop_finished_from_running(self) -> None:
        if self.finished_req_ids:  # nobody else can have finished
            self.running = [request for request in self.running if not request.is_finished]
