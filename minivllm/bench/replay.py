"""replay: a workload through an engine, each request sent when it is due, and what came of it as a Trace. Open loop, but for
conversations: a request of turn 2 is sent when those of turn 1 of its group have ended, as a person reads before asking on.

    llm = LLM(trace=True)
    trace = replay(llm, make("chat", n=8, rate=2.0))          in real time
    trace = replay(llm, workload, clock=VirtualClock())       in made-up time, the same on every machine

A request counts as arrived when it was due, even if the engine was busy and took it a step later: measured from the moment it
is taken, waits under load would vanish from the figures (their name is coordinated omission). May not know torch.
"""

from __future__ import annotations

from collections import deque

from minivllm.bench.workloads import Workload, WorkloadRequest
from minivllm.core.step import EngineCoreRequest
from minivllm.llm import LLM
from minivllm.llm_engine import LLMEngine, Sink
from minivllm.observe.clock import Clock, WallClock
from minivllm.observe.recorder import RecordingEngineCore
from minivllm.observe.trace import Trace
from minivllm.output_processor import OutputKind
from minivllm.sampling_params import SamplingParams


def replay(
    engine: LLM | LLMEngine | RecordingEngineCore,
    workload: Workload,
    *,
    clock: Clock | None = None,
    params: SamplingParams | None = None,
) -> Trace:
    """Run a workload; returns a trace of its own, which is the engine's from now on (an older `llm.trace` keeps what it has).

    engine: an LLM or LLMEngine with trace=True, idle; or a RecordingEngineCore, which takes token ids only.
    clock: the time requests arrive in and the trace is written in; None is the machine's.
    params: sampling of all requests, but for max_tokens; None is greedy, going on past end tokens.
    Raises ValueError for an engine that records nothing or is busy, and for a request that it refuses.
    """
    front = engine.llm_engine if isinstance(engine, LLM) else engine
    core = front.engine_core if isinstance(front, LLMEngine) else front
    if not isinstance(core, RecordingEngineCore):
        raise ValueError("replay() needs an engine that records: make it with LLM(trace=True).")
    if core.has_unfinished_requests():
        raise ValueError("replay() needs an idle engine: requests are running. Let them end or abort them first.")
    params = params or SamplingParams(temperature=0.0, ignore_eos=True)
    submitter: _Submitter = _ToFrontEnd(front, params) if isinstance(front, LLMEngine) else _ToCore(core, params)
    clock_before, core.clock = core.clock, clock or WallClock()
    core.trace = core.new_trace()
    try:
        return _Replay(core, submitter, workload).run()
    finally:
        submitter.abort_all()
        core.clock = clock_before


class _Replay:
    """One run: what is still to come, what is open, and which turns of which group have ended."""

    def __init__(self, core: RecordingEngineCore, submitter: _Submitter, workload: Workload) -> None:
        self.core = core
        self.submitter = submitter
        self.pending = deque(sorted(workload.requests, key=lambda request: request.arrival_s))
        self.open: dict[str, WorkloadRequest] = {}  # by the engine's id
        self.turns: dict[str, list[int]] = {}  # of each group, the turns of its requests that have not ended
        for request in workload.requests:
            self.turns.setdefault(request.group, []).append(request.turn)
        self.released: dict[str, float] = {}  # when the last request of each group ended

    def run(self) -> Trace:
        clock, trace = self.core.clock, self.core.trace
        trace.origin = start = clock.now()
        while self.pending or self.open:
            self._send_due(clock.now() - start)
            if self.open:
                ended = self.submitter.step()
                for request_id in ended:
                    request = self.open.pop(request_id)
                    self.turns[request.group].remove(request.turn)
                    self.released[request.group] = clock.now() - start
            else:  # nothing runs, so whoever is left waits for nobody: for the time alone
                clock.sleep_until(start + self.pending[0].arrival_s)
        return trace

    def _send_due(self, now: float) -> None:
        not_yet = []
        while self.pending and self.pending[0].arrival_s <= now:
            request = self.pending.popleft()
            if request.turn > min(self.turns[request.group]):
                not_yet.append(request)
                continue
            request_id = self.submitter.send(request)
            self.open[request_id] = request
            record = self.core.trace.requests[self.core.shown_id(request_id)]
            record.group, record.turn = request.group, request.turn
            record.arrival = max(request.arrival_s, self.released.get(request.group, 0.0) if request.turn else 0.0)
        self.pending.extendleft(reversed(not_yet))


class _Submitter:
    """How requests get into an engine, and how one hears that they ended."""

    def send(self, request: WorkloadRequest) -> str:
        """Returns the id the engine knows it by."""
        raise NotImplementedError

    def step(self) -> list[str]:
        """One step. Returns the ids of the requests that ended."""
        raise NotImplementedError

    def abort_all(self) -> None:
        """End what still runs."""
        raise NotImplementedError


class _ToFrontEnd(_Submitter):
    def __init__(self, engine: LLMEngine, params: SamplingParams) -> None:
        self.engine, self.params = engine, params
        self.sink = Sink()
        self.open: set[str] = set()
        self.num_sent = 0

    def send(self, request: WorkloadRequest) -> str:
        params = self.params.replaced(max_tokens=request.max_tokens)
        name = str(self.num_sent)
        self.num_sent += 1
        request_id = self.engine.add_request(name, request.as_prompt(), params, OutputKind.FINAL_ONLY, self.sink)
        self.open.add(request_id)
        return request_id

    def step(self) -> list[str]:
        self.engine.step()
        ended = [request_id for request_id, _ in self.sink]
        self.sink.clear()
        self.open.difference_update(ended)
        return ended

    def abort_all(self) -> None:
        self.engine.abort(self.open)


class _ToCore(_Submitter):
    def __init__(self, core: RecordingEngineCore, params: SamplingParams) -> None:
        self.core, self.params = core, params
        self.open: set[str] = set()
        self.num_sent = 0

    def send(self, request: WorkloadRequest) -> str:
        if request.prompt_token_ids is None:
            raise ValueError("An EngineCore takes token ids: replay workload.encoded(word_ids), or encode with your tokenizer.")
        params = self.params.replaced(max_tokens=request.max_tokens)
        request_id = str(self.num_sent)
        self.num_sent += 1
        self.core.add_request(EngineCoreRequest(request_id, request.prompt_token_ids, params))
        self.open.add(request_id)
        return request_id

    def step(self) -> list[str]:
        ended = [output.request_id for output in self.core.step() if output.finish_reason is not None]
        self.open.difference_update(ended)
        return ended

    def abort_all(self) -> None:
        self.core.abort_requests(self.open)
