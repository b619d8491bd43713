"""Trace: what each step of an engine did, as plain data. Used by the labs from 05 on; the file anyone can save and reload.
May not know torch, plots, or the engine: `recorder.py` fills it, `timeline.py` and the others draw it.

    Trace  .steps     [StepRecord, ...]                 one an engine step: who got which tokens, which blocks moved, times
           .requests  {request id: RequestRecord}       one a request: when it came, each of its tokens, how it ended

    step       1                2          3        time ->
    request A  prefill 0..15    decode     decode           tokens["A"] = ScheduledTokens(num_computed=0, num_tokens=16, ...)
    request B                   prefill    preempted        preempted = ["B"], freed = its blocks

All times are seconds since the trace began (its first request), on the engine's clock. Ids are the ones the user knows
(`RequestOutput.request_id`); a second request of the same id is "id#2".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

FORMAT = "minivllm-trace"
VERSION = 1


@dataclass(slots=True)
class ScheduledTokens:
    """What one request computes in one step: positions num_computed .. num_computed + num_tokens - 1.

    num_prefill: how many of them were known before the request could go on: its prompt, or all it had when it came back
    from a preemption. 0 is a decode.   num_drafts: how many are guesses to verify.   num_accepted: how many guesses were right.
    """

    num_computed: int
    num_tokens: int
    num_prefill: int = 0
    num_drafts: int = 0
    num_accepted: int = 0

    @property
    def is_prefill(self) -> bool:
        return self.num_prefill > 0


@dataclass(slots=True)
class StepRecord:
    """One step. What it says of blocks and counts holds after the step, requests that ended in it gone.

    start: when planning began.   schedule_s, execute_s, sample_s, update_s: the parts of the step (sample_s: sampling and the
        wait for the tokens).
    blocks: block table of each running request.   taken: blocks that somebody holds now and nobody did before, a cached one
        that was hit included.   freed: the opposite, in the order they were let go.   evicted: those of `taken` whose cached
        content was lost.   cached_tokens: of each request admitted in this step, how many tokens the prefix cache gave it.
    preempted, finished: requests that gave way, and requests that ended, aborted ones too.   sampled: the tokens each gained.
    error: what failed, when the step's forward pass did.
    """

    index: int
    start: float
    schedule_s: float = 0.0
    execute_s: float = 0.0
    sample_s: float = 0.0
    update_s: float = 0.0
    tokens: dict[str, ScheduledTokens] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    cached_tokens: dict[str, int] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    sampled: dict[str, list[int]] = field(default_factory=dict)
    error: str | None = None

    @property
    def duration(self) -> float:
        return self.schedule_s + self.execute_s + self.sample_s + self.update_s

    @property
    def end(self) -> float:
        return self.start + self.duration

    @property
    def num_tokens(self) -> int:
        """Tokens computed, of the budget."""
        return sum(tokens.num_tokens for tokens in self.tokens.values())

    @property
    def num_prefill_tokens(self) -> int:
        return sum(tokens.num_prefill for tokens in self.tokens.values())

    @property
    def num_decode_tokens(self) -> int:
        return self.num_tokens - self.num_prefill_tokens


@dataclass(slots=True)
class RequestRecord:
    """One request's life. `first_token`, `finish` and `finish_reason` ("stop", "length", "abort", "error") are None until they
    happen; `token_times` has one entry an output token, equal ones where drafts were accepted together. `num_cached_tokens` is
    of the first admission. `group` and `turn` say which conversation of a workload it belongs to, where `replay` knows."""

    request_id: str
    arrival: float
    first_token: float | None = None
    token_times: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    finish: float | None = None
    finish_reason: str | None = None
    num_preemptions: int = 0
    group: str = ""
    turn: int = 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_times)

    @property
    def ttft(self) -> float | None:
        """Time to the first token, seconds from arrival. None before it."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: seconds between each output token and the one before; one fewer than there are tokens."""
        return [after - before for before, after in pairwise(self.token_times)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: the mean of `itl`. None with fewer than two tokens."""
        if len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)

    @property
    def e2e(self) -> float | None:
        """Seconds from arrival to the end. None while it runs."""
        return None if self.finish is None else self.finish - self.arrival


@dataclass(slots=True)
class Trace:
    """The steps and requests of an engine, and the limits they ran under (0: not known).

    model: its name.   block_size, num_blocks: of the KV pool, null block included.   max_num_batched_tokens: the budget.
    """

    model: str = ""
    block_size: int = 0
    num_blocks: int = 0
    max_num_batched_tokens: int = 0
    max_num_seqs: int = 0
    steps: list[StepRecord] = field(default_factory=list)
    requests: dict[str, RequestRecord] = field(default_factory=dict)
    origin: float | None = field(default=None, repr=False, compare=False)  # of the recorder's clock; not saved

    def clear(self) -> None:
        """Forget all, and let the time begin again with what happens next. A request that is running is recorded from here on,
        with an arrival before zero."""
        self.steps.clear()
        self.requests.clear()
        self.origin = None

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def duration(self) -> float:
        """Seconds to the last thing recorded."""
        ends = [step.end for step in self.steps] + [r.finish for r in self.requests.values() if r.finish is not None]
        return max(ends, default=0.0)

    # ---------------------------------------------------------------- files

    def save(self, path: str | Path) -> None:
        """Write as JSON lines: what ran, then a line a request, then a line a step."""
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            for line in self._lines():
                file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def _lines(self) -> Iterator[dict[str, Any]]:
        head = {name: getattr(self, name) for name in _HEAD}
        yield {"format": FORMAT, "version": VERSION, **head}
        for request in self.requests.values():
            yield {"request": asdict(request)}
        for step in self.steps:
            yield {"step": asdict(step)}

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote. Raises ValueError naming the file and line if it is something else."""
        trace: Trace | None = None
        number = 0
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    entry = json.loads(line)
                    if trace is None:
                        trace = cls._from_head(entry)
                    elif "request" in entry:
                        request = RequestRecord(**entry["request"])
                        trace.requests[request.request_id] = request
                    else:
                        trace.steps.append(_step_from(entry["step"]))
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                    raise ValueError(f"{path}, line {number} is not a line of a trace: {error}.") from error
        if trace is None:
            raise ValueError(f"{path} is empty: a trace has at least its first line.")
        return trace

    @classmethod
    def _from_head(cls, entry: dict[str, Any]) -> Trace:
        if entry.get("format") != FORMAT:
            raise ValueError(f"the first line must say format {FORMAT!r}")
        if entry.get("version") != VERSION:
            raise ValueError(f"version {entry.get('version')!r} is not {VERSION}, the one this minivllm reads")
        return cls(**{name: entry[name] for name in _HEAD})


_HEAD = ("model", "block_size", "num_blocks", "max_num_batched_tokens", "max_num_seqs")


def _step_from(entry: dict[str, Any]) -> StepRecord:
    step = StepRecord(**entry)
    step.tokens = {request_id: ScheduledTokens(**tokens) for request_id, tokens in entry["tokens"].items()}
    return step
