"""The messages between the front end and the engine core's process, and their bytes. The only place that knows msgspec.

Labs: built by none. May not know sockets or processes. A message is one MessagePack object, tagged with its type; what is in it
are the core's own dataclasses, so nothing is translated on the way.
"""

from __future__ import annotations

from typing import Any

import msgspec

from minivllm.config import EngineConfig
from minivllm.core.step import EngineCoreOutput, EngineCoreRequest, FinishReason


class _Message(msgspec.Struct, tag=True):
    pass


class Launch(_Message):
    """How a core is started: one line of JSON on its stdin, which stays open; its end is the front end's.

    commands, reports: addresses of the two sockets.   components: a folder of replaced parts.   config.model: a folder.
    """

    config: EngineConfig
    components: str | None
    commands: str
    reports: str


# ---------------------------------------------------------------- commands: front end -> core


class Add(_Message):
    """A request to queue. One that is refused comes back as `Refused`."""

    request: EngineCoreRequest


class Abort(_Message):
    """reason: STOP where the front end found a stop string."""

    request_ids: list[str]
    reason: FinishReason = FinishReason.ABORT


class Call(_Message):
    """A question that gets a `Reply` with its number. method: "snapshot" or "reset_prefix_cache"."""

    call_id: int
    method: str


class Shutdown(_Message):
    """End, now."""


Command = Add | Abort | Call | Shutdown


# ---------------------------------------------------------------- reports: core -> front end


class Progress(_Message):
    """A line of the core's log, with `logging`'s level."""

    level: int
    text: str


class Part(msgspec.Struct):
    """A replaced part as the front end sees it. capabilities None: it does not say, so it can do all."""

    module: str
    qualname: str
    capabilities: list[str] | None


class Ready(_Message):
    """The core serves. config: settled.   vocab_size, eos_token_ids: the model's.   num_blocks: of the pool, null block
    included.
    parts: seam -> what is plugged in, where it is not ours."""

    config: EngineConfig
    vocab_size: int
    eos_token_ids: list[int]
    num_blocks: int
    parts: dict[str, Part]


class Failed(_Message):
    """The core could not start. is_users: a ValueError and the like, which says what to change."""

    error: str
    is_users: bool


class CoreStats(msgspec.Struct):
    """The core after a step, or after it became idle. Counts of requests and blocks are of now, the others since the last
    report.

    prefix_queries, prefix_hits: prompt tokens of the requests admitted, and how many of them were found in the prefix cache.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_tokens: int = 0
    num_preempted: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


class Outputs(_Message):
    """What one step brought, and the core's counts after it."""

    outputs: list[EngineCoreOutput]
    stats: CoreStats


class Refused(_Message):
    """The core does not take a request: a ValueError."""

    request_id: str
    error: str


class Reply(_Message):
    """The answer to the `Call` with this number."""

    call_id: int
    value: Any


class Heartbeat(_Message):
    """The core's process lives. step_seconds: how long the step in progress has been running, 0 between steps."""

    step_seconds: float


Report = Progress | Ready | Failed | Outputs | Refused | Reply | Heartbeat

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(Command)
_report_decoder = msgspec.msgpack.Decoder(Report)


def encode(message: Command | Report) -> bytes:
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    return _command_decoder.decode(data)


def decode_report(data: bytes) -> Report:
    return _report_decoder.decode(data)


def launch_line(launch: Launch) -> bytes:
    return msgspec.json.encode(launch) + b"\n"


def parse_launch_line(line: bytes) -> Launch:
    return msgspec.json.decode(line, type=Launch)
