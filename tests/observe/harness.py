"""Engines over the echo model that record, and a run that a person can follow."""

from __future__ import annotations

from typing import Any

from minivllm.components import Components
from minivllm.config import EngineConfig
from minivllm.core.step import EngineCoreRequest
from minivllm.observe.clock import VirtualClock
from minivllm.observe.recorder import RecordingEngineCore
from minivllm.observe.trace import Trace
from minivllm.sim.echo import DeferredExecutor, EchoExecutor
from tests.core.harness import VOCAB


def recording_engine(
    num_blocks: int = 101,
    *,
    components: dict[str, Any] | None = None,
    echo: dict[str, Any] | None = None,
    deferred: bool = False,
    **config: Any,
) -> RecordingEngineCore:
    """As tests.core.harness.make_engine, but it records, in virtual time: a step takes a second."""
    config = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, "trace": True, **config}
    executor: Any = EchoExecutor(num_blocks, config["block_size"], **{"vocab_size": VOCAB, **(echo or {})})
    if deferred:
        executor = DeferredExecutor(executor)
    settled = EngineConfig(**config).resolved("cpu")
    engine = RecordingEngineCore(settled, executor, Components(components), vocab_size=VOCAB)
    engine.clock = VirtualClock(lambda step: 1.0)
    return engine


def run(engine: RecordingEngineCore, *requests: EngineCoreRequest, max_steps: int = 2000) -> Trace:
    for request in requests:
        engine.add_request(request)
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            return engine.trace
        engine.step()
    raise AssertionError(f"no end after {max_steps} steps")
