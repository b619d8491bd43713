"""The HTTP side: OpenAI's endpoints over an AsyncLLM. Labs: built by none (the SSE framing is given to Lab 11). May not know
the core, processes, or torch.

    request -> Gate (key, size) -> FastAPI (shape) -> a stream of the engine for each prompt -> JSON, or events

A client that goes away takes its requests with it: whatever is awaited for it is cancelled, streams are closed, and the core
frees their blocks before its next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from minivllm import __version__
from minivllm.output_processor import OutputKind
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams
from minivllm.serving.async_llm import AsyncLLM, EngineDeadError, OutputStream, RequestAbortedError
from minivllm.serving.metrics import Metrics
from minivllm.serving.protocol import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    bad_request,
)
from minivllm.serving.responses import ChatCompletions, Completions, Json, usage

RETRY_AFTER_SECONDS = 1
_OPEN_PATHS = ("/", "/health", "/version", "/metrics")  # without a key; they tell no text


@dataclass(frozen=True)
class ServerSettings:
    """model_names: the first is the one that answers say; requests may name any.   api_keys: none is open to all.
    max_open_requests: completions (prompts times n) at once, waiting ones included; more get 429.   max_request_bytes: of a
    body.   trust_request_chat_template: a request may bring a template of its own, a program that runs here (in a sandbox, for
    seconds at most, but in nobody else's time: it holds up all streams). Names of the model's templates may always be given.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_open_requests: int = 1024
    max_request_bytes: int = 8 << 20
    trust_request_chat_template: bool = False


def create_app(llm: AsyncLLM, settings: ServerSettings, metrics: Metrics) -> FastAPI:
    """The application over a started engine. `metrics` is the engine's observer."""
    app = FastAPI(title="minivllm", version=__version__, docs_url=None, redoc_url=None)  # those load scripts from elsewhere
    app.add_middleware(Gate, api_keys=settings.api_keys, max_bytes=settings.max_request_bytes)
    _answer_errors(app)
    api = _Api(llm, settings, metrics)
    for path, endpoint in (("/v1/completions", api.completions), ("/v1/chat/completions", api.chat_completions)):
        app.post(path)(endpoint)
    app.post("/tokenize")(api.tokenize)
    app.post("/detokenize")(api.detokenize)
    app.get("/v1/models")(api.models)
    app.get("/v1/models/{name:path}")(api.model)
    app.get("/health", response_class=Response)(api.health)
    app.get("/metrics", response_class=PlainTextResponse)(api.metrics_text)
    app.get("/version")(api.version)
    app.get("/stats")(api.stats)
    app.get("/", response_class=HTMLResponse)(api.page)
    return app


class _Api:
    """The endpoints."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, metrics: Metrics) -> None:
        self.llm = llm
        self.settings = settings
        self.metrics = metrics
        self.num_open = 0  # completions, until their last byte is sent

    # ---------------------------------------------------------------- text

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        body.check()
        params = body.sampling_params(self.llm.get_default_sampling_params())
        return await self._generate(Completions, body, body.prompts(), params, request)

    async def chat_completions(self, body: ChatCompletionRequest, request: Request) -> Response:
        body.check()
        params = body.sampling_params(self.llm.get_default_sampling_params())
        messages = [message.model_dump(exclude_unset=True) for message in body.messages]
        self._check_template(body.chat_template)
        prompt = self.llm.render_chat(messages, **body.template_options())
        if body.cache_salt is not None:
            prompt["cache_salt"] = body.cache_salt
        return await self._generate(ChatCompletions, body, [prompt], params, request)

    async def _generate(
        self,
        answers: type[Completions] | type[ChatCompletions],
        body: Any,
        prompts: list[Any],
        params: SamplingParams,
        request: Request,
    ) -> Response:
        """Open a stream for each prompt, and answer from them: with a JSON object, or with events."""
        self._check_model(body.model)
        response_id = self._response_id(answers.id_prefix, body, request)
        answer: Any = answers(body, response_id, self.settings.model_names[0], self.llm.tokenizer)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._room_for(len(prompts) * params.n))
            streams = []
            for i, prompt in enumerate(prompts):
                name = response_id if len(prompts) == 1 else f"{response_id}-{i}"
                kind = OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY
                stream = self.llm.stream(prompt, params, request_id=name, priority=body.priority, kind=kind)
                stack.callback(stream.close)
                streams.append(stream)
            if body.stream:
                deltas = together(streams)
                # Until there is something to say an error can still be a status.
                first = await _or_disconnect(request, anext(deltas))
                if first is None:
                    return Response(status_code=499)
                _check_output(first[1])
                events = _events(answer, first, deltas, body.include_usage)
                return EventStream(events, stack.pop_all())
            outputs = await _or_disconnect(request, asyncio.gather(*map(anext, streams)))
            if outputs is None:
                return Response(status_code=499)
            for output in outputs:
                _check_output(output)
            return json_response(answer.whole(outputs))

    def _check_model(self, name: str | None) -> None:
        if name and name not in self.settings.model_names:
            known = ", ".join(self.settings.model_names)
            message = f"The model {name!r} is not served here; there is: {known}."
            raise ApiError(404, message, param="model", code="model_not_found")

    def _check_template(self, given: str | None) -> None:
        known = self.llm.get_tokenizer().chat_templates
        if given is not None and given not in known and not self.settings.trust_request_chat_template:
            names = ", ".join(known) or "none"
            message = (
                f"A chat_template in a request is a program, and this server runs the model's own only (by name: {names})."
                " Start it with --trust-request-chat-template to allow others."
            )
            raise ApiError(400, message, param="chat_template")

    def _response_id(self, prefix: str, body: Any, request: Request) -> str:
        given = body.request_id or request.headers.get("x-request-id")
        return f"{prefix}-{given or uuid.uuid4().hex}"

    @contextlib.contextmanager
    def _room_for(self, n: int) -> Any:
        limit = self.settings.max_open_requests
        if n > limit:
            raise ApiError(400, f"The request asks for {n} completions; the server takes {limit} at once.", param="n")
        if self.num_open + n > limit:
            message = f"The server has {self.num_open} completions open and takes {limit}. Try again in a moment."
            raise ApiError(429, message, code="too_many_requests", headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
        self.num_open += n
        try:
            yield
        finally:
            self.num_open -= n

    # ---------------------------------------------------------------- tokens

    async def tokenize(self, body: TokenizeRequest) -> Response:
        self._check_model(body.model)
        tokenizer = self.llm.get_tokenizer()
        if body.kind == "messages":
            messages = [message.model_dump(exclude_unset=True) for message in body.messages or []]
            rendered = self.llm.render_chat(messages, add_generation_prompt=body.add_generation_prompt)
            token_ids = rendered["prompt_token_ids"]
        else:
            token_ids = tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
        strings = [tokenizer.token_to_piece(token_id) for token_id in token_ids] if body.return_token_strs else None
        limit = self.llm.config.max_model_len
        return json_response({"count": len(token_ids), "max_model_len": limit, "tokens": token_ids, "token_strs": strings})

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        self._check_model(body.model)
        tokenizer = self.llm.get_tokenizer()
        if bad := [t for t in body.tokens if not 0 <= t < tokenizer.vocab_size]:
            raise ApiError(400, f"tokens has {bad[0]}: ids go from 0 to {tokenizer.vocab_size - 1}.", param="tokens")
        return json_response({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

    # ---------------------------------------------------------------- about the server

    async def models(self) -> Response:
        return json_response({"object": "list", "data": [self._model(name) for name in self.settings.model_names]})

    async def model(self, name: str) -> Response:
        self._check_model(name)
        return json_response(self._model(name))

    def _model(self, name: str) -> Json:
        served = {"id": name, "object": "model", "created": 0, "owned_by": "minivllm", "root": self.settings.model_names[0]}
        return {**served, "max_model_len": self.llm.config.max_model_len}

    async def health(self) -> Response:
        if (wrong := self.llm.what_is_wrong()) is not None:
            raise ApiError(503, wrong)
        return Response()

    async def metrics_text(self) -> Response:
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    async def version(self) -> Response:
        return json_response({"version": __version__})

    async def stats(self) -> Response:
        """What the page shows: counts, and each open request with its blocks."""
        stats = self.metrics.stats
        snapshot = await self.llm.snapshot()
        return json_response(
            {
                "model": self.settings.model_names[0],
                "max_model_len": self.llm.config.max_model_len,
                "max_num_seqs": self.llm.config.max_num_seqs,
                "block_size": self.llm.config.block_size,
                "num_running": stats.num_running,
                "num_waiting": stats.num_waiting,
                "num_generated_tokens": self.metrics.num_generated_tokens,
                **snapshot,
            }
        )

    async def page(self) -> Response:
        return HTMLResponse(resources.files("minivllm.serving").joinpath("page.html").read_text(encoding="utf-8"))


# ---------------------------------------------------------------- events


async def together(streams: list[OutputStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The outputs of several streams as they come, with the stream's number."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    waiting = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = waiting.pop(task)
                output = task.result()
                if not output.finished:
                    waiting[asyncio.ensure_future(anext(streams[i]))] = i
                yield i, output
    finally:
        for task in waiting:
            task.cancel()


async def _events(
    answer: Any, first: tuple[int, RequestOutput], deltas: AsyncIterator[tuple[int, RequestOutput]], include_usage: bool
) -> AsyncIterator[str]:
    """A streamed answer as server-sent events. An error in mid-stream is an event: the status is out."""
    prompts: dict[int, RequestOutput] = {}
    num_tokens = 0
    try:
        async for i, delta in _prepend(first, deltas):
            _check_output(delta)
            prompts[i] = delta
            num_tokens += sum(len(one.token_ids) for one in delta.outputs)
            for chunk in answer.chunks(i, delta):
                yield event(chunk)
        if include_usage:
            yield event(answer.chunk([], usage(prompts, num_tokens)))
    except Exception as error:
        yield event(_as_api_error(error).body())
    yield "data: [DONE]\n\n"


async def _prepend(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for item in rest:
        yield item


def event(data: Json) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _check_output(output: RequestOutput) -> None:
    """Raises ApiError for a request that failed in the engine."""
    if output.error is not None:
        raise ApiError(500, output.error, code="engine_error")


class EventStream(Response):
    """Sends events as they come, and leaves as soon as the client does. `resources` is closed at the end, whichever it is.

    A client that reads slowly makes `send` wait; meanwhile its deltas are added up in its OutputStream.
    """

    def __init__(self, events: AsyncIterator[str], resources: contextlib.ExitStack) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._resources = resources

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._resources:
            sending = asyncio.ensure_future(self._send(send))
            leaving = asyncio.ensure_future(_disconnected(receive))
            try:
                await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
            finally:
                for task in (sending, leaving):
                    task.cancel()
                await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for text in self._events:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _or_disconnect(request: Request, work: Awaitable[Any]) -> Any:
    """The result of some work; None, and the work cancelled, if the client leaves before."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


# ---------------------------------------------------------------- the gate, and errors


class Gate:
    """ASGI middleware: keys and sizes are checked before anything is parsed. The body is read here, whole, and handed on."""

    def __init__(self, app: Any, api_keys: tuple[str, ...], max_bytes: int) -> None:
        self.app = app
        self.api_keys = [key.encode() for key in api_keys]
        self.max_bytes = max_bytes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._check_key(scope["path"], headers.get(b"authorization", b""))
            if scope["method"] == "POST":
                receive = self._replay(await self._body(headers, receive), receive)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        except _ClientLeftError:
            return
        await self.app(scope, receive, send)

    def _check_key(self, path: str, authorization: bytes) -> None:
        if not self.api_keys or path in _OPEN_PATHS:
            return
        given = authorization.removeprefix(b"Bearer ")
        if not any(hmac.compare_digest(given, key) for key in self.api_keys):
            message = "This server wants a key: send it as the header 'Authorization: Bearer KEY'."
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _body(self, headers: dict[bytes, bytes], receive: Callable[[], Coroutine[Any, Any, Any]]) -> bytes:
        announced = headers.get(b"content-length", b"0")
        too_large = ApiError(
            413,
            f"The request is larger than {self.max_bytes} bytes. Shorten it, or raise --max-request-bytes.",
            code="request_too_large",
            headers={"Connection": "close"},
        )
        if announced.isdigit() and int(announced) > self.max_bytes:
            raise too_large
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _ClientLeftError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.max_bytes:
                raise too_large
            more = message.get("more_body", False)
        return b"".join(parts)

    @staticmethod
    def _replay(body: bytes, receive: Any) -> Any:
        given = False

        async def replayed() -> Any:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        return replayed


class _ClientLeftError(Exception):
    pass


def json_response(data: Any, status: int = 200) -> Response:
    return JSONResponse(data, status_code=status)


def error_response(error: ApiError) -> Response:
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead")
    if isinstance(error, RequestAbortedError):
        return ApiError(503, str(error), code="aborted")
    if isinstance(error, ValueError):
        return bad_request(str(error))
    return ApiError(500, f"{type(error).__name__}: {error}", code="internal_error")


def _answer_errors(app: FastAPI) -> None:
    async def any_error(request: Request, error: Exception) -> Response:
        return error_response(_as_api_error(error))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = f"There is no {request.method} {request.url.path} here." if error.status_code in (404, 405) else error.detail
        return error_response(ApiError(error.status_code, text))

    async def shape_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(_describe_shape(error))

    for kind in (ApiError, EngineDeadError, RequestAbortedError, ValueError, Exception):  # the last is a fault, and logged
        app.add_exception_handler(kind, any_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, shape_error)


def _describe_shape(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, by the name of its field."""
    problem = error.errors()[0]
    if problem["type"] == "json_invalid":
        return ApiError(400, f"The body is not JSON: {problem.get('ctx', {}).get('error', problem['msg'])}.")
    place = [str(part) for part in problem["loc"] if part != "body"]
    param = place[0] if place else None
    given = problem.get("input")
    shown = "" if problem["type"] == "missing" else f" (got {given!r:.60})"
    return ApiError(400, f"{param or 'The body'}: {problem['msg']}{shown}.", param=param)
