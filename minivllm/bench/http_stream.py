"""A POST whose answer comes as server-sent events: the client side of a load test, in as little work as possible, because it
measures on the machine it shares with the server. HTTP/1.1 over asyncio's streams, a connection a request. Pure Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit


class HttpError(Exception):
    """The server refused, or did not speak HTTP to the end. status: None if there was none."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


async def post_events(url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> AsyncGenerator[Any, None]:
    """The JSON of each "data:" event, up to [DONE]. Raises HttpError for any status but 200, and for an answer cut off."""
    is_done = False
    async with contextlib.aclosing(_lines(url, json.dumps(body).encode(), headers or {})) as lines:
        async for line in lines:
            if line == b"data: [DONE]":
                is_done = True
            elif line.startswith(b"data:"):
                yield json.loads(line[5:])
    if not is_done:
        raise HttpError("The answer was cut off before [DONE].")


async def _lines(url: str, data: bytes, headers: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no http:// or https:// address.")
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure)
    try:
        head = {
            "Host": parts.netloc,
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            "Connection": "close",
            **headers,
        }
        lines = [f"POST {parts.path or '/'} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        await writer.drain()
        status, is_chunked = await _read_head(reader)
        pieces = _chunks(reader) if is_chunked else _to_the_end(reader)
        if status != 200:
            text = b"".join([piece async for piece in pieces]).decode("utf-8", errors="replace")
            raise HttpError(f"HTTP {status}: {text[:300]}", status)
        rest = b""
        async for piece in pieces:
            *complete, rest = (rest + piece).split(b"\n")
            for line in complete:
                yield line.rstrip(b"\r")
    except asyncio.IncompleteReadError:
        raise HttpError("The connection was closed in the middle of the answer.") from None
    finally:
        writer.close()
        with contextlib.suppress(Exception):
            await writer.wait_closed()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Status, and whether the body comes in chunks."""
    first = (await reader.readuntil(b"\r\n")).split(b" ", 2)
    if not first[0].startswith(b"HTTP/1."):
        raise HttpError(f"This is not HTTP/1: {b' '.join(first)[:80]!r}")
    is_chunked = False
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        name, _, value = line.partition(b":")
        is_chunked |= name.lower() == b"transfer-encoding" and b"chunked" in value.lower()
    return int(first[1]), is_chunked


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _to_the_end(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(65536):
        yield piece
