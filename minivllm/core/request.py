"""Request: one sequence inside the core, and every counter the scheduler needs. The labs are given it ready-made.

There is no "prefill" or "decode" flag: `num_computed_tokens` chases the tokens the request has, and where it stands says all.

    all_token_ids   p p p p p p p p | o o o | d d          p prompt, o output, d draft (not accepted yet, so not in the list)
                    '- num_prompt_tokens    |   |
                    '-- num_tokens ---------'   |          what is known: prompt and outputs
                    '-- num_tokens_with_spec ---'          what one step may compute at most
                    '-- num_computed_tokens --> ?          what has KV, or will when the steps in flight come back
                            '-- num_in_flight_tokens       how much of that is in steps that have not come back yet

May not know blocks, queues, or torch.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum

from minivllm.core.step import EngineCoreRequest, FinishReason
from minivllm.sampling_params import SamplingParams


class RequestStatus(Enum):
    """Where a request stands. Whether it prefills or decodes is no status: its counters say that."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again, after its blocks were taken
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """State of one request. Only the scheduler changes it (what concerns the hashes of its blocks: the KV cache manager).

    max_tokens: output tokens it may have at most; what the user asked for, cut so that prompt and output are max_model_len.
    stop_eos_ids: the model's end tokens, empty if the request ignores them.   worker_eos_ids: the same, whatever it ignores.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int
    stop_eos_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    worker_eos_ids: tuple[int, ...] = ()
    seed: int = 0
    priority: int = 0
    arrival_time: float = 0.0
    cache_salt: str | None = None
    lora_digest: str | None = None
    skip_reading_prefix_cache: bool = False

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    arrival_index: int = -1  # set by the scheduler: breaks ties of arrival_time
    arrival_step: int = 0  # set by the scheduler: the first step it can be in

    num_prompt_tokens: int = field(init=False)
    all_token_ids: list[int] = field(init=False)
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_output_placeholders: int = 0  # tokens a step in flight will bring: asynchronous scheduling counts on them unseen
    spec_token_ids: list[int] = field(default_factory=list)

    block_hashes: list[Hashable] = field(default_factory=list)  # of full blocks, computed once each, kept through preemption
    next_token_in_hashes: bool = False  # set by the KV cache manager, with an EAGLE head: see extend_block_hashes
    num_published_blocks: int = 0  # leading blocks of its table already offered to the prefix cache
    num_cached_tokens: int = -1  # prompt tokens found in the prefix cache at *first* admission; -1 before
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.all_token_ids = list(self.prompt_token_ids)

    @classmethod
    def from_engine_core_request(cls, request: EngineCoreRequest, max_model_len: int) -> Request:
        params = request.sampling_params
        room = max_model_len - len(request.prompt_token_ids)
        return cls(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_eos_ids=frozenset() if params.ignore_eos else frozenset(request.eos_token_ids),
            stop_token_ids=frozenset(params.stop_token_ids),
            worker_eos_ids=request.eos_token_ids,
            seed=request.seed,
            priority=request.priority,
            arrival_time=request.arrival_time,
            cache_salt=request.cache_salt,
            lora_digest=request.lora_digest,
            skip_reading_prefix_cache=request.skip_reading_prefix_cache,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        return len(self.all_token_ids) + len(self.spec_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def sort_key(self) -> tuple[int, float, int]:
        """Priority order, best first: a lower priority value, then who came earlier."""
        return self.priority, self.arrival_time, self.arrival_index
