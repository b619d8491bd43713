"""LLMEngine: the front end around the core. Requests in, each consumer's RequestOutputs out.

    add_request -> InputProcessor -> EngineCore.step() -> OutputProcessor -> the consumer's sink

The engine advances when somebody waits for an output, and then always with all open requests together. What a step yields for
others waits in their sinks, so a consumer that stops reading holds nobody up. Threads take turns, one step each. May not know
torch, or what a chat is.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from minivllm.components import Components
from minivllm.config import EngineConfig
from minivllm.core.engine_core import EngineCore, apply_capabilities
from minivllm.core.step import Executor, FinishReason
from minivllm.input_processor import InputProcessor, Prompt
from minivllm.output_processor import OutputKind, OutputProcessor
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams
from minivllm.text.tokenizer import Tokenizer

Sink = deque[tuple[str, RequestOutput]]  # (internal request id, output), until their consumer takes them


class LLMEngine:
    """config: resolved for the device. `self.config` is the settled one: fitted to the pool, less what a replaced part lacks.
    vocab_size, model_max_len, eos_token_ids: the model's. Raises ValueError if settings, pool and parts contradict each other.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        model_max_len: int,
        eos_token_ids: tuple[int, ...] = (),
        components: Components | None = None,
    ) -> None:
        components = components or Components()
        config = apply_capabilities(config, components).fit_max_model_len(model_max_len, executor.num_blocks)
        self.config = config
        self.executor = executor
        engine_core: type[EngineCore] = EngineCore
        if config.trace:
            from minivllm.observe.recorder import RecordingEngineCore

            engine_core = RecordingEngineCore
        self.engine_core = engine_core(config, executor, components, vocab_size)
        self.input_processor = InputProcessor(
            config,
            tokenizer,
            vocab_size=vocab_size,
            num_blocks=executor.num_blocks,
            eos_token_ids=eos_token_ids,
            components=components,
        )
        self.output_processor = OutputProcessor(tokenizer, components)
        self._sinks: dict[str, Sink] = {}  # of the open requests, by internal id
        self._abandoned: deque[str] = deque()
        self._lock = threading.RLock()  # held while the core's state changes
        self._is_at_work = False

    def add_request(
        self, user_id: str, prompt: Prompt, params: SamplingParams, kind: OutputKind, sink: Sink, priority: int = 0
    ) -> str:
        """Queue a request whose outputs go to `sink`; nothing runs yet. Returns its internal id. ValueError for a bad one."""
        request = self.input_processor.process(user_id, prompt, params, priority=priority)
        with self._at_work():
            try:
                for core in request.cores:
                    self.engine_core.add_request(core)
                self.output_processor.add_request(request, kind)
            except BaseException:  # a detokenizer that cannot be built: nobody would take the request out again
                self.engine_core.abort_requests([core.request_id for core in request.cores])
                raise
            self._sinks[request.request_id] = sink
        return request.request_id

    def next_output(self, sink: Sink, after_step: Callable[[], None] | None = None) -> tuple[str, RequestOutput]:
        """The next output in a sink; steps the engine until there is one. Raises RuntimeError if there can be none any more."""
        while not sink:
            with self._at_work():
                if sink:  # another thread's step filled it
                    break
                if not any(waiting is sink for waiting in self._sinks.values()):
                    raise RuntimeError("The request is gone: the engine was shut down, or a step broke off.")
                self.step()
            if after_step is not None:
                after_step()
        return sink.popleft()

    def step(self) -> None:
        """One step for all open requests; its outputs go to their sinks. Ctrl-C takes effect after it."""
        with _interrupts_deferred(), self._at_work():
            self._abort_abandoned()
            try:
                processed = self.output_processor.process(self.engine_core.step())
                self.engine_core.abort_requests(processed.to_abort, FinishReason.STOP)
            except BaseException:
                # Not a failed forward, of which the core fails the requests alone: a broken part. Nothing it touched is kept.
                for request_id in list(self._sinks):
                    with contextlib.suppress(Exception):  # it may break again; the first error tells more
                        self.abort([request_id])
                raise
            for request_id, output in processed.outputs:
                self._sinks[request_id].append((request_id, output))
                if output.finished:
                    del self._sinks[request_id]

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests and free their blocks; their consumers hear nothing more. Ids of ended ones are skipped."""
        with self._at_work():
            ids = [request_id for request_id in request_ids if request_id in self._sinks]
            core_ids = self.output_processor.abort(ids)
            for request_id in ids:
                del self._sinks[request_id]
            self.engine_core.abort_requests(core_ids)

    def abandon(self, request_id: str) -> None:
        """`abort` for the garbage collector, which may call in the middle of anything: then it waits for the next step."""
        self._abandoned.append(request_id)
        if not self._is_at_work:
            self._abort_abandoned()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False, and nothing done, while requests hold blocks."""
        with self._at_work():
            self._abort_abandoned()
            return self.engine_core.reset_prefix_cache()

    def shutdown(self) -> None:
        """Abort what is open and let the executor go."""
        with self._at_work():
            self.abort(list(self._sinks))
            self.executor.shutdown()

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            self.abort([self._abandoned.popleft()])

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """While the core's state changes. Another thread waits here; the garbage collector's `abandon` does not."""
        with self._lock:
            before, self._is_at_work = self._is_at_work, True
            try:
                yield
            finally:
                self._is_at_work = before


class TokenStream:
    """The outputs of one request as they come: an iterator of deltas. Closing or dropping it aborts the request."""

    def __init__(self, engine: LLMEngine, request_id: str, sink: Sink) -> None:
        self._engine: LLMEngine | None = engine  # None: ended or closed
        self._request_id = request_id
        self._sink = sink

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        if self._engine is None:
            raise StopIteration
        _, output = self._engine.next_output(self._sink)
        if output.finished:
            self._engine = None
        return output

    def close(self) -> None:
        """Abort the request if it still runs. What was not read is dropped."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.abandon(self._request_id)

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Let a step end before Ctrl-C takes effect, so that no counter is left half changed. A second Ctrl-C does not wait."""
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(handler):  # not the thread that gets signals, or nobody listens
        yield
        return
    caught: list[FrameType | None] = []

    def hold(signum: int, frame: FrameType | None) -> None:
        caught.append(frame)
        if len(caught) > 1:
            handler(signum, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if caught:
        handler(signal.SIGINT, caught[0])
