"""The messages of one step, between the control plane and the data plane. Plain slotted dataclasses of integers and lists,
so that they can be logged, compared, and sent to another process. May not know torch.

    Scheduler.schedule()  -> SchedulerOutput -> Executor.submit(...) ; Executor.sample() -> handle ; handle.result()
    -> StepOutput -> Scheduler.update_from_output(...) -> [EngineCoreOutput]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from minivllm.sampling_params import SamplingParams


class FinishReason(str, Enum):
    """Why a request ended, in OpenAI's words and two of ours."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True)
class EngineCoreRequest:
    """A request as it enters the core: token ids, no text. `request_id` is unique in the life of the engine: the front end adds
    a random suffix to the user's, which is `external_req_id`. `seed` keys the request's sampling noise: the params' seed, or
    one the front end drew. `eos_token_ids` are the model's end tokens; the params may say to ignore them."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    lora_digest: str | None = None
    skip_reading_prefix_cache: bool = False  # compute every prompt position (prompt_logprobs need them all)
    external_req_id: str | None = None  # None: the user sees `request_id` itself


@dataclass(slots=True)
class NewRequestData:
    """What a worker is told when a request enters its batch, for the first time or again after a preemption.
    `token_ids` is the whole known sequence (prompt, then outputs so far if resumed); `block_ids` its whole block table, cached
    prefix included; `num_computed_tokens` how many of its tokens already have KV (before this step's)."""

    req_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]
    block_ids: list[int]
    num_computed_tokens: int


@dataclass(slots=True)
class CachedRequestData:
    """The difference for requests the worker's persistent batch already holds; parallel lists, one entry a request that is
    scheduled this step. Sampled tokens are not sent back down: the worker appended them itself."""

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[list[int]] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerOutput:
    """One step's work order. `num_scheduled_tokens[req]` tokens are computed for each request, positions
    num_computed_tokens .. num_computed_tokens + n - 1. A request whose n reaches the end of its known tokens yields a sampled
    token (plus verified drafts); others (a prefill chunk) yield none. Workers drop `finished_req_ids` and
    `preempted_req_ids` from their batch before the step."""

    step_id: int
    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    preempted_req_ids: list[str] = field(default_factory=list)
    finished_req_ids: list[str] = field(default_factory=list)


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position: the sampled token first, then the top ones, parallel lists."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass(slots=True)
class StepOutput:
    """What a step computed. `sampled_token_ids[req]` is [] for a prefill chunk, else accepted drafts plus one token.
    `logprobs[req]`, where asked for, has an entry a token; `prompt_logprobs[req]`, with the request's first token, one for each
    prompt token but the first. `draft_token_ids[req]` are proposals for the next step.
    `errors[req]` fails that request alone (for example NaN logits)."""

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class EngineCoreOutput:
    """News of one request after a step: the tokens it gained and, at the end, why it ended."""

    request_id: str
    new_token_ids: list[int] = field(default_factory=list)
    new_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None


class ExecutorDeadError(RuntimeError):
    """The executor can compute nothing any more: after an illegal memory access, every call to a GPU fails. Raised out of the
    engine, which then has to be started anew; any other error of a step ends that step's requests alone."""


class StepHandle(Protocol):
    """A step in flight."""

    def result(self) -> StepOutput:
        """Wait for the step; raises whatever the forward raised."""
        ...


class Executor(Protocol):
    """The data plane as the control plane sees it. Implementations: worker.model_runner.ModelRunner (real),
    sim.echo.EchoExecutor (integers, exact), and the deferred one tests use for asynchrony."""

    num_blocks: int

    def submit(self, scheduler_output: SchedulerOutput) -> None:
        """Queue the forward pass of one step."""
        ...

    def sample(self, grammar_mask: Any = None) -> StepHandle:
        """Queue sampling for the step submitted last."""
        ...

    def shutdown(self) -> None: ...
