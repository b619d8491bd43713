"""EngineCore: the loop that ties a scheduler to an executor, one step at a time, and keeps every failure as small as it is.
Given ready-made to the labs; it is what their parts are plugged into. May not know token text, tensors, or torch.

    add_request -> Scheduler     step():  schedule -> executor.submit -> executor.sample -> handle.result -> update_from_output
                                          '------------- begin_step -------------'  '------------ end_step ------------'
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections import deque
from collections.abc import Iterable
from typing import Any

from minivllm.components import Components
from minivllm.config import EngineConfig
from minivllm.core.radix_cache import RadixKVCacheManager
from minivllm.core.request import Request
from minivllm.core.step import (
    EngineCoreOutput,
    EngineCoreRequest,
    Executor,
    ExecutorDeadError,
    FinishReason,
    SchedulerOutput,
    StepHandle,
    StepOutput,
)

logger = logging.getLogger("minivllm")

# Settings that ask for a prefix cache by name.
_NEED_CACHING = {"enable_prefix_caching": True, "prefix_cache": "radix", "scheduling_policy": "longest_prefix"}


class EngineCore:
    """Requests in, tokens out.

    config: resolved for the device and fitted to the pool.   components: replaced parts; what they cannot do is off or refused.
    vocab_size: token ids of prompts must be below it; None does not check.
    Raises ValueError when the settings, the pool and the parts contradict each other.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        components: Components | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.components = components or Components()
        config = apply_capabilities(config, self.components)
        # Again, should the caller have gone around it: a sequence longer than the pool could never finish, nor be
        # preempted for room.
        self.config = config.fit_max_model_len(config.max_model_len or sys.maxsize, executor.num_blocks)
        self.executor = executor
        self.vocab_size = vocab_size
        self.kv_cache_manager = _make_kv_cache_manager(self.config, self.components, executor.num_blocks)
        self.scheduler = _make_scheduler(self.config, self.components, self.kv_cache_manager)
        _refuse_pool_without_preemption(self.config, self.components, executor.num_blocks)

        self._in_flight: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        self._untold: list[str] = []  # ids the worker should have dropped in a step that was not submitted, or failed
        self._num_empty_steps = 0  # in a row

    # ---------------------------------------------------------------- requests

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. Raises ValueError for one that can never run, or whose id is in use; the engine is unchanged
        then."""
        self._check_prompt(request.prompt_token_ids)
        self._check_asked_for(request)
        assert self.config.max_model_len is not None
        self.scheduler.add_request(Request.from_engine_core_request(request, self.config.max_model_len))

    def abort_requests(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> None:
        """End requests now, also while a step is in flight. Unknown ids are skipped: a request may have just ended by
        itself. `reason` is STOP where a stop string was found: text is the front end's."""
        self.scheduler.finish_requests(request_ids, reason)

    def has_unfinished_requests(self) -> bool:
        return bool(self.scheduler.requests)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False, and nothing done, while requests hold blocks."""
        return bool(self.scheduler.kv_cache_manager.reset_prefix_cache())

    def _check_prompt(self, token_ids: list[int]) -> None:
        limit = self.config.max_model_len
        assert limit is not None
        if not token_ids:
            raise ValueError("The prompt is empty: it needs at least one token.")
        if len(token_ids) >= limit:
            usable, size = self.executor.num_blocks - 1, self.config.block_size
            raise ValueError(
                f"The prompt has {len(token_ids)} tokens, but max_model_len={limit} must hold it and at least one output token"
                f" (the KV pool holds {usable} blocks of {size}: {usable * size} tokens). Shorten it to {limit - 1} tokens, or"
                " raise max_model_len (kv_cache_memory_bytes if the pool is the limit)."
            )
        top = (2**63 if self.vocab_size is None else self.vocab_size) - 1
        if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) <= top:
            return
        i, bad = next((i, t) for i, t in enumerate(token_ids) if type(t) is not int or not 0 <= t <= top)
        raise ValueError(f"Token {i} of the prompt is {bad!r}; token ids are integers from 0 to {top}.")

    def _check_asked_for(self, request: EngineCoreRequest) -> None:
        """What a single request asks of parts that may not have it."""
        stop_token_ids = request.sampling_params.stop_token_ids
        if self.vocab_size is not None and (unknown := [t for t in stop_token_ids if t >= self.vocab_size]):
            raise ValueError(f"stop_token_ids has {unknown[0]}, but the vocabulary ends at {self.vocab_size - 1}. Remove it.")
        if stop_token_ids:
            self.components.require("scheduler", "stops", f"stop_token_ids={stop_token_ids}")
        if request.priority != 0 and self.config.scheduling_policy != "priority":
            policy = self.config.scheduling_policy
            raise ValueError(f'priority={request.priority} needs scheduling_policy="priority"; this engine runs "{policy}".')
        if self.config.enable_prefix_caching is not False and self.config.prefix_cache == "hash":
            for name in ("cache_salt", "lora_digest"):
                if (value := getattr(request, name)) is not None:
                    self.components.require("block_hash", "salt", f"{name}={value!r}")

    # ---------------------------------------------------------------- steps

    def step(self) -> list[EngineCoreOutput]:
        """One step from plan to tokens. Returns news of the requests that gained tokens or ended. Never raises for a
        failed forward, which fails the requests it was for, unless none can succeed any more (ExecutorDeadError)."""
        self.begin_step()
        return self.end_step()

    def begin_step(self) -> bool:
        """Plan a step and send it off; False if there was no token to compute. Requests may come and be aborted before
        `end_step` takes it in."""
        step = self._schedule()
        step.finished_req_ids = self._untold + step.finished_req_ids
        self._untold = []
        if step.total_num_scheduled_tokens == 0:
            self._untold = step.finished_req_ids + step.preempted_req_ids
            return False
        handle: StepHandle
        try:
            handle = self._execute(step)
        except BaseException as error:  # Ctrl-C as well: end_step undoes the step, then raises it
            handle = _FailedStep(error)
        self._in_flight.append((step, handle))
        return True

    def end_step(self) -> list[EngineCoreOutput]:
        """Wait for the oldest step in flight and take it in."""
        if not self._in_flight:
            return self._count_empty_step()
        self._num_empty_steps = 0
        step, handle = self._in_flight.popleft()
        try:
            result = handle.result()
        except BaseException as error:
            outputs = self._fail_step(step, error)
            if isinstance(error, ExecutorDeadError) or not isinstance(error, Exception):
                raise
            return outputs
        return self._update(step, result)

    # The parts of a step, each a method of its own, so that a recorder can time them (observe/recorder.py).

    def _schedule(self) -> SchedulerOutput:
        step: SchedulerOutput = self.scheduler.schedule()
        return step

    def _execute(self, step: SchedulerOutput) -> StepHandle:
        self.executor.submit(step)
        return self.executor.sample()

    def _update(self, step: SchedulerOutput, result: StepOutput) -> list[EngineCoreOutput]:
        return list(self.scheduler.update_from_output(step, result))

    def _fail_step(self, step: SchedulerOutput, error: BaseException) -> list[EngineCoreOutput]:
        """End the requests of a step that raised, and no others. Steps scheduled after it computed on top of it: they
        fail with it."""
        message = f"The forward pass of step {step.step_id} failed: {type(error).__name__}: {error}"
        logger.error("%s (%d requests)", message, len(step.num_scheduled_tokens), exc_info=error)
        failed = [step]
        while self._in_flight:
            later, handle = self._in_flight.popleft()
            with contextlib.suppress(Exception):
                handle.result()
            failed.append(later)
        outputs = []
        for part in failed:
            self._untold += part.finished_req_ids + part.preempted_req_ids
            outputs += self._end_with_error([request.request_id for request in self.scheduler.requests_in(part)], message)
        return outputs

    def _count_empty_step(self) -> list[EngineCoreOutput]:
        """The guard against spinning for ever. A step without tokens is right only if it preempted somebody, and admits
        nobody then: so there can be no more in a row than running requests. Beyond that the scheduler is stuck (a
        replaced part, for ours cannot be): its requests fail and say so.
        """
        assert self.config.max_num_seqs is not None
        if not self.has_unfinished_requests():
            self._num_empty_steps = 0
            return []
        self._num_empty_steps += 1
        if self._num_empty_steps <= self.config.max_num_seqs:
            return []
        scheduler = type(self.scheduler)
        message = (
            f"{scheduler.__module__}.{scheduler.__qualname__} scheduled no token in {self._num_empty_steps} steps although"
            f" {len(self.scheduler.requests)} requests wait: they could never end."
        )
        logger.error(message)
        self._num_empty_steps = 0
        return self._end_with_error(list(self.scheduler.requests), message)

    def _end_with_error(self, request_ids: list[str], message: str) -> list[EngineCoreOutput]:
        ended = self.scheduler.finish_requests(request_ids, FinishReason.ERROR)
        return [EngineCoreOutput(r.request_id, finish_reason=FinishReason.ERROR, error=message) for r in ended]


class _FailedStep:
    """The handle of a step that never got under way."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def result(self) -> StepOutput:
        raise self._error


def _make_scheduler(config: EngineConfig, components: Components, kv_cache_manager: Any) -> Any:
    """A scheduler is told of a drafter's slots only where there is one: a replaced one may not know the word."""
    drafter = config.speculative_config
    if drafter is not None:
        components.require("scheduler", "mixed batches", f"speculative_config with method={drafter.method!r}")
    if drafter is None or drafter.num_lookahead_tokens == 0:
        return components.pick("scheduler")(config, kv_cache_manager)
    return components.pick("scheduler")(config, kv_cache_manager, num_lookahead_tokens=drafter.num_lookahead_tokens)


def _make_kv_cache_manager(config: EngineConfig, components: Components, num_blocks: int) -> Any:
    """The block tables over a pool, with the prefix cache that was chosen."""
    block_pool = components.pick("block_pool")(num_blocks)
    caching = config.enable_prefix_caching is not False
    assert config.max_model_len is not None
    eagle = {"use_eagle": True} if config.speculative_config is not None and config.speculative_config.use_eagle else {}
    if config.prefix_cache == "hash":
        return components.pick("kv_cache_manager")(
            block_pool,
            config.block_size,
            config.max_model_len,
            enable_caching=caching,
            hash_block=components.pick("block_hash"),
            **eagle,
        )
    if unused := [name for name in ("kv_cache_manager", "block_hash") if name in components]:
        logger.info("prefix_cache='radix' does not use your %s: minivllm's own manager goes with the tree.", ", ".join(unused))
    return RadixKVCacheManager(
        block_pool,
        config.block_size,
        config.max_model_len,
        enable_caching=caching,
        radix_cache=components.pick("radix_cache"),
        **eagle,
    )


def apply_capabilities(config: EngineConfig, components: Components) -> EngineConfig:
    """A copy of the config with the features off that a replaced part cannot do (one line each in the log). Call it before
    `fit_max_model_len`, which depends on it. Raises ValueError for a feature the user asked for by name."""

    def can(seam: str, capability: str, name: str, asked: bool) -> bool:
        return components.require(seam, capability, f"{name}={getattr(config, name)!r}" if asked else None)

    needed = [("block_pool", "caching"), ("kv_cache_manager", "prefix caching")]
    if config.prefix_cache == "radix":
        needed += [("radix_cache", "radix")]
    asked_for = next((name for name, value in _NEED_CACHING.items() if getattr(config, name) == value), None)
    caching = config.enable_prefix_caching is not False and all(
        can(seam, capability, asked_for or "enable_prefix_caching", asked_for is not None) for seam, capability in needed
    )
    chunking = config.enable_chunked_prefill is not False and can(
        "scheduler", "chunking", "enable_chunked_prefill", config.enable_chunked_prefill is True
    )
    if config.scheduling_policy != "fcfs":
        can("scheduler", config.scheduling_policy.replace("_", " "), "scheduling_policy", True)
    if config.long_prefill_token_threshold and not chunking:
        can("scheduler", "chunking", "long_prefill_token_threshold", True)
    return dataclasses.replace(
        config,
        enable_prefix_caching=config.enable_prefix_caching if caching else False,
        enable_chunked_prefill=config.enable_chunked_prefill if chunking else False,
    )


def _refuse_pool_without_preemption(config: EngineConfig, components: Components, num_blocks: int) -> None:
    """A scheduler that cannot preempt needs room for the most requests at their longest."""
    assert config.max_model_len is not None and config.max_num_seqs is not None
    needed = config.max_num_seqs * -(-config.max_model_len // config.block_size)
    if needed > num_blocks - 1:
        components.require(
            "scheduler",
            "preemption",
            f"max_num_seqs={config.max_num_seqs} with max_model_len={config.max_model_len} ({needed} blocks of"
            f" {config.block_size}; the KV pool has {num_blocks - 1})",
        )
