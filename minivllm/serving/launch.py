"""`minivllm serve`: a server's life, from the socket to the exit code. Labs: built by none. May not know what is in a request.

    bind the port -> start the engine core -> serve ----- SIGTERM, Ctrl-C: no new connections; open answers are finished -> 0
                                                 '------- the core dies: open answers fail, /health is red for a while  -> 1

A second signal ends at once, as does `shutdown_timeout`. A core that died is not restarted here: whoever supervises the server
(systemd, a container platform) sees the exit code and starts it afresh, weights, cache and all.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from minivllm.serving.api_server import ServerSettings, create_app
from minivllm.serving.async_llm import AsyncLLM, EngineDeadError
from minivllm.serving.metrics import Metrics

logger = logging.getLogger("minivllm")

RED_SECONDS = 3.0  # a dead server answers so long before it exits: open answers get their error, load balancers see /health


@dataclass(frozen=True)
class LaunchSettings:
    """host, port: port 0 takes a free one.   components: a folder of replaced parts.   engine: EngineConfig's fields.
    shutdown_timeout: seconds that open answers have after the first signal."""

    server: ServerSettings
    engine: dict[str, Any]
    host: str = "127.0.0.1"
    port: int = 8000
    components: Path | None = None
    shutdown_timeout: float = 60.0
    log_requests: bool = False


def serve(settings: LaunchSettings) -> int:
    """Run until told to stop. Returns the exit code. Raises ValueError or OSError for what keeps it from starting."""
    with contextlib.closing(listen(settings.host, settings.port)) as listener:
        return asyncio.run(_serve(settings, listener))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, taken before the model is loaded: a port in use is told at once, and clients that come early wait."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"Port {port} of {host} is in use. Stop what listens there, or choose another --port.") from None
        raise OSError(f"Cannot listen on {host}, port {port}: {error.strerror or error}.") from None
    return listener


async def _serve(settings: LaunchSettings, listener: socket.socket) -> int:
    names = settings.server.model_names
    metrics = Metrics(names[0])
    llm = AsyncLLM(components=settings.components, observer=metrics, **settings.engine)
    starting = asyncio.ensure_future(llm.start())
    server: _Server | None = None

    def stop() -> None:
        if server is None:
            starting.cancel()
        else:
            server.stop()

    with _on_signals(stop):
        try:
            await starting
            metrics.describe(llm.config, llm.num_blocks)
            server = _Server(_uvicorn_config(create_app(llm, settings.server, metrics), settings))
            llm.on_death = server.die_soon
            if llm.dead is not None:  # in this very moment
                raise llm.dead
            logger.info("%s", _greeting(names[0], listener, bool(settings.server.api_keys)))
            await server.serve(sockets=[listener])
            return 1 if llm.dead is not None else 0
        except asyncio.CancelledError:
            logger.info("Stopped before it was ready.")
            return 0
        except EngineDeadError as error:
            logger.error("%s", error)
            return 1
        finally:
            await llm.shutdown()


def _uvicorn_config(app: Any, settings: LaunchSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,  # the log is ours
        access_log=settings.log_requests,
        lifespan="off",
        timeout_graceful_shutdown=max(1, int(settings.shutdown_timeout)),
        ws="none",
        server_header=False,
    )


class _Server(uvicorn.Server):
    """uvicorn, with signals left to us: it would raise them again after the drain, and end with their exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        if self.should_exit:
            logger.info("Second signal: stopping at once.")
            self.force_exit = True
        else:
            logger.info("Stopping: no new connections; open answers are finished (a second signal stops at once).")
            self.should_exit = True

    def die_soon(self, error: EngineDeadError) -> None:
        """Red for a while, then gone."""
        asyncio.get_running_loop().call_later(RED_SECONDS, self._die)

    def _die(self) -> None:
        self.should_exit = self.force_exit = True


@contextlib.contextmanager
def _on_signals(stop: Any) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    try:
        for number in signals:
            loop.add_signal_handler(number, stop)
    except (NotImplementedError, RuntimeError):  # Windows
        for number in signals:
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop))
        yield
        return
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _greeting(model: str, listener: socket.socket, has_key: bool) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    key = " -H 'Authorization: Bearer KEY'" if has_key else ""
    return (
        f"Serving {model} at {url} (Ctrl-C stops). Open {url} in a browser, or:\n"
        f"  curl {url}/v1/completions{key} -H 'Content-Type: application/json'"
        f""" -d '{{"prompt": "The capital of France is", "max_tokens": 16}}'"""
    )
