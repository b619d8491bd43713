"""AsyncLLM: the engine for programs that have an event loop, such as a server. Lab 11 builds `OutputRouter`
(exercise 11.2). May not know HTTP or torch: the core is in another process.

    async with AsyncLLM("smollm2-135m") as llm:
        output = await llm.generate("The capital of France is", SamplingParams(max_tokens=20))
        async for delta in llm.stream("Once upon a time"):
            print(delta.outputs[0].text, end="")

    prompt -> InputProcessor --Add--> core process --Outputs--> OutputProcessor -> OutputRouter -> a stream for each request
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from minivllm.components import SEAMS, Components, load_file
from minivllm.config import EngineConfig
from minivllm.core.step import EngineCoreOutput, EngineCoreRequest, FinishReason
from minivllm.generation_config import default_sampling_params
from minivllm.input_processor import InputProcessor, Prompt, end_token_ids
from minivllm.llm import load_tokenizer, model_folder
from minivllm.output_processor import OutputKind, OutputProcessor
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams
from minivllm.serving import echo_model, wire
from minivllm.serving.core_client import CoreClient, EngineDeadError
from minivllm.text.chat import Message, render_chat
from minivllm.text.tokenizer import Tokenizer

logger = logging.getLogger("minivllm")


class RequestAbortedError(RuntimeError):
    """`AsyncLLM.abort` ended the request; its reader is told so."""


class OutputQueue:
    """What the reader of one request has not read yet.

    It holds *one* output at most. What comes while nobody reads is added to it, so a slow reader gets fewer and longer pieces,
    holds up nobody, and costs no more memory than the text it has not read.
    """

    def __init__(self) -> None:
        self.is_over = False  # nothing more will be put
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Never waits."""
        if self._pending is None:
            self._pending = output
        else:
            self._pending.add(output)
        self.is_over = output.finished
        self._news.set()

    def end(self) -> None:
        """The reader leaves. One that waits, in another task, waits no longer."""
        self.is_over = True
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Let the reader have what there is, then this error."""
        self._error, self.is_over = error, True
        self._news.set()

    async def get(self) -> RequestOutput:
        """Waits for an output. Raises StopAsyncIteration after the last, or the error."""
        while self._pending is None:
            if self._error is not None:
                raise self._error
            if self.is_over:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        output, self._pending = self._pending, None
        return output


class OutputStream:
    """The reader's end of a queue: an async iterator. `leave(request_id)` is called if its reader goes before the last output:
    closes it, leaves its `async with`, or drops it."""

    def __init__(self, request_id: str, queue: OutputQueue, leave: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._queue = queue
        self._leave = leave

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        return await self._queue.get()

    def close(self) -> None:
        """A request that still runs is aborted."""
        if not self._queue.is_over:
            self._queue.end()
            self._leave(self.request_id)

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class OutputRouter:
    """Who gets which output: a queue for each open request. `abort(request_id)` is called for one whose reader leaves before
    its end."""

    def __init__(self, abort: Callable[[str], None]) -> None:
        self.abort = abort
        self.queues: dict[str, OutputQueue] = {}

    def __len__(self) -> int:
        return len(self.queues)

    def open(self, request_id: str) -> OutputStream:
        """The stream of a new request, for its reader."""
        self.queues[request_id] = queue = OutputQueue()
        return OutputStream(request_id, queue, self.leave)

    def route(self, request_id: str, output: RequestOutput) -> None:
        """To the request's own queue, and no other. The last output closes it; what comes for a reader who has left is
        dropped."""
        queue = self.queues.get(request_id)
        if queue is None:
            return
        queue.put(output)
        if output.finished:
            del self.queues[request_id]

    def leave(self, request_id: str) -> None:
        """The reader of a request that still runs has gone: nobody wants the rest."""
        if self.queues.pop(request_id, None) is not None:
            self.abort(request_id)

    def fail(self, error: Exception, request_id: str | None = None) -> None:
        """End one stream, or all, with an error."""
        for key in list(self.queues) if request_id is None else [request_id]:
            if (queue := self.queues.pop(key, None)) is not None:
                queue.fail(error)


class Observer(Protocol):
    """Whoever counts (`metrics.py`). All are called in the event loop, and must not wait."""

    def added(self, request: EngineCoreRequest) -> None: ...
    def stepped(self, outputs: Sequence[EngineCoreOutput], stats: wire.CoreStats) -> None: ...
    def ended(self, core_request_ids: Sequence[str], reason: str) -> None:
        """Ended from outside the core: aborted, a stop string, the core's death."""


class AsyncLLM:
    """A model behind an event loop. Nothing is started before `start` (or `async with`), which must be called in the loop that
    uses it.

    model, settings: as for LLM; "echo" and "echo:MS" are the model of `echo_model.py`.
    components: a folder of replaced parts (not objects: they are loaded in the core's process).   make_router: makes what does
    `OutputRouter`'s work, of the function that aborts; if not given, the one of `components`' serving/async_llm.py, or ours.
    Raises ValueError for settings that are wrong or not supported, some of them only in `start`.

    Attributes, once started: config (settled), tokenizer, model_path, num_blocks.
    """

    def __init__(
        self,
        model: str | Path = "smollm2-135m",
        *,
        components: str | Path | None = None,
        observer: Observer | None = None,
        make_router: Callable[[Callable[[str], None]], OutputRouter] | None = None,
        **settings: Any,
    ) -> None:
        self.config = EngineConfig.from_kwargs(model=str(model), **settings)
        if self.config.trace:
            raise ValueError("trace=True is LLM's: a server's engine is in another process. Use /metrics, or LLM(trace=True).")
        self.dead: EngineDeadError | None = None
        self.on_death: Callable[[EngineDeadError], None] | None = None
        self._components = None if components is None else Path(components)
        self._observer = observer
        self._client = CoreClient(self._core_died)
        self._router = (make_router or _router_in(self._components))(self._abort)
        self._user_ids: dict[str, str] = {}  # of the open requests, by internal id
        self._counter = itertools.count()
        self._output_task: asyncio.Task[None] | None = None

    async def start(self) -> AsyncLLM:
        """Start the engine core and wait until it is ready; its progress is logged. Raises ValueError, OSError or
        EngineDeadError for what it fails with."""
        try:
            await self._start()
        except BaseException:
            await self.shutdown()  # a core that is up already is not left behind
            raise
        return self

    async def _start(self) -> None:
        config = self.config
        echo = echo_model.is_echo(config.model)
        if echo:
            echo_model.check(config)
        # Fetching takes long: off the loop, so that Ctrl-C and the rest of the program are heard meanwhile.
        folder = None if echo else await asyncio.to_thread(model_folder, config)
        self.model_path = folder
        self.tokenizer = echo_model.make_tokenizer() if echo else load_tokenizer(config, folder)
        logger.info("Loading %s.", config.model)
        ready = await self._client.start(config, self._components)
        self.config = ready.config
        self.num_blocks = ready.num_blocks
        parts = _parts_of_the_front_end(self._components, ready.parts)
        self._default_params = default_sampling_params(folder if config.generation_config == "auto" else None, parts)
        self._input_processor = InputProcessor(
            ready.config,
            self.tokenizer,
            vocab_size=ready.vocab_size,
            num_blocks=ready.num_blocks,
            eos_token_ids=() if echo else end_token_ids(self.tokenizer, ready.eos_token_ids, ready.vocab_size),
            components=parts,
        )
        self._output_processor = OutputProcessor(self.tokenizer, parts)
        self._output_task = asyncio.create_task(self._take_reports())

    async def __aenter__(self) -> AsyncLLM:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()

    # ---------------------------------------------------------------- requests

    async def generate(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """One prompt, or one conversation, to its end. options: `stream`'s. Cancelling the task aborts the request."""
        async with self.stream(prompt, sampling_params, kind=OutputKind.FINAL_ONLY, **options) as stream:
            return await anext(stream)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        kind: OutputKind = OutputKind.DELTA,
    ) -> OutputStream:
        """The output as it comes: each RequestOutput holds only what is new (with FINAL_ONLY there is one, with everything).

        request_id: must not be that of an open request.   Closing the stream, or dropping it, aborts the request.
        Raises ValueError for a bad request, EngineDeadError if the engine is gone; reading may raise them, too.
        """
        if self.dead is not None:
            raise self.dead
        user_id = f"{next(self._counter)}" if request_id is None else request_id
        if user_id in self._user_ids.values():
            raise ValueError(f"request_id {user_id!r} is in use: wait until that request ends, abort it, or choose another.")
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        is_conversation = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        text: Any = self.render_chat(prompt) if is_conversation else prompt  # type: ignore[arg-type]
        request = self._input_processor.process(user_id, text, params, priority=priority)
        self._output_processor.add_request(request, kind)
        stream = self._router.open(request.request_id)
        self._user_ids[request.request_id] = user_id
        for core in request.cores:
            if self._observer is not None:
                self._observer.added(core)
            self._client.send(wire.Add(core))
        return stream

    async def abort(self, request_id: str) -> None:
        """End the request that was opened under this id; its reader is told so by an error. Unknown ids are skipped."""
        for internal in [key for key, user_id in self._user_ids.items() if user_id == request_id]:
            self._abort(internal)
            self._router.fail(RequestAbortedError(f"Request {request_id!r} was aborted."), internal)

    def render_chat(self, messages: Sequence[Message], **options: Any) -> dict[str, Any]:
        """A conversation as a prompt. options: `text.chat.render_chat`'s."""
        tokenizer = self.get_tokenizer()
        text = render_chat(tokenizer, messages, **options)
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    # ---------------------------------------------------------------- state

    @property
    def num_open_requests(self) -> int:
        return len(self._router)

    def get_tokenizer(self) -> Tokenizer:
        """Raises ValueError for a model without one."""
        return self._input_processor.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        return self._default_params.replaced()

    def what_is_wrong(self) -> str | None:
        """None while the engine is well."""
        return self._client.what_is_wrong()

    async def snapshot(self) -> dict[str, Any]:
        """The core's open requests and their blocks, between two steps."""
        found: dict[str, Any] = await self._client.call("snapshot")
        return found

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False, and nothing done, while requests hold blocks."""
        return bool(await self._client.call("reset_prefix_cache"))

    async def shutdown(self) -> None:
        """End the core; requests that are open fail."""
        self._router.fail(self.dead or EngineDeadError("The engine was shut down."))
        self.dead = self.dead or EngineDeadError("The engine was shut down.")
        if self._output_task is not None:
            self._output_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._output_task
            self._output_task = None
        await self._client.close()

    # ---------------------------------------------------------------- what comes back

    async def _take_reports(self) -> None:
        async for report in self._client.reports():
            if isinstance(report, wire.Outputs):
                if self._observer is not None:
                    self._observer.stepped(report.outputs, report.stats)
                for news in report.outputs:
                    self._take(news)
            elif isinstance(report, wire.Refused):
                self._refuse(report)

    def _take(self, news: EngineCoreOutput) -> None:
        """News of one request, on its own: a detokenizer that breaks ends nobody else's."""
        try:
            processed = self._output_processor.process([news])
        except Exception as error:
            logger.exception("The output of %s cannot be processed", news.request_id)
            internal = self._output_processor.request_id_of(news.request_id)
            self._router.fail(RuntimeError(f"The output cannot be processed: {type(error).__name__}: {error}"), internal)
            self._abort(internal)
            return
        if processed.to_abort:  # a stop string was found: the core does not know
            self._end_in_core(processed.to_abort, FinishReason.STOP)
        for request_id, output in processed.outputs:
            if output.finished:
                self._user_ids.pop(request_id, None)
            self._router.route(request_id, output)

    def _refuse(self, report: wire.Refused) -> None:
        internal = self._output_processor.request_id_of(report.request_id)
        self._router.fail(ValueError(report.error), internal)
        self._abort(internal)

    def _abort(self, request_id: str) -> None:
        """Forget a request here, and have the core free its blocks before its next step."""
        core_ids = self._output_processor.abort([request_id])
        self._user_ids.pop(request_id, None)
        if core_ids:
            self._end_in_core(core_ids, FinishReason.ABORT)

    def _end_in_core(self, core_ids: list[str], reason: FinishReason) -> None:
        if self._observer is not None:
            self._observer.ended(core_ids, reason.value)
        self._client.send(wire.Abort(core_ids, reason))

    def _core_died(self, error: EngineDeadError) -> None:
        logger.error("%s %d open requests fail.", error, len(self._router))
        self.dead = error
        if self._observer is not None:
            self._observer.stepped([], wire.CoreStats())
        self._router.fail(error)
        if self.on_death is not None:
            self.on_death(error)


def _router_in(folder: Path | None) -> type[OutputRouter]:
    """The router of a components folder. It is no seam: nothing in the core knows it."""
    if folder is None or not (file := folder / "serving" / "async_llm.py").is_file():
        return OutputRouter
    router: type[OutputRouter] = load_file(file, folder).OutputRouter
    return router


def _parts_of_the_front_end(folder: Path | None, parts: Mapping[str, wire.Part]) -> Components:
    """What the front end has to know of the core's replaced parts: their names and what they can do. The detokenizer alone runs
    here, so it is loaded again, in this process."""
    known: dict[str, Any] = {name: _StandIn(part) for name, part in parts.items()}
    if folder is not None and "detokenizer" in known:
        seam = SEAMS["detokenizer"]
        known["detokenizer"] = getattr(load_file(folder / seam.file, folder), seam.attribute)
    return Components(known)


class _StandIn:
    """A part that lives in the core's process."""

    def __init__(self, part: wire.Part) -> None:
        self.__module__ = part.module
        self.__qualname__ = part.qualname
        if part.capabilities is not None:
            self.capabilities = frozenset(part.capabilities)

    def __call__(self, *args: object) -> None:
        raise RuntimeError(f"{self.__qualname__} runs in the engine core's process.")


__all__ = ["AsyncLLM", "EngineDeadError", "Observer", "OutputQueue", "OutputRouter", "OutputStream", "RequestAbortedError"]
