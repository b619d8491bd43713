"""The engine core in a process of its own: commands in, steps, reports out. Labs: built by none. May not know HTTP or text.

    python -m minivllm.serving.engine_process       (started by `core_client.py`, which writes a Launch to its stdin)

    commands --> [ take all there are | wait if there is nothing to do ] --> EngineCore.step() --> reports
                   Add, Abort, Call, Shutdown                                 Outputs, Refused, Reply

Commands are taken between steps, so an abort frees its blocks before the next one. Nothing here waits for the front end:
reports go into ZeroMQ's queue, whose own thread sends them. The process ends when told to, or when its stdin does: nobody
leaves it behind by being killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from typing import Any

import zmq

from minivllm.components import Components
from minivllm.core.engine_core import EngineCore, apply_capabilities
from minivllm.core.step import EngineCoreOutput, Executor, ExecutorDeadError, FinishReason, SchedulerOutput, StepHandle
from minivllm.serving import echo_model, wire

logger = logging.getLogger("minivllm")

HEARTBEAT_SECONDS = 1.0


class CoreLoop:
    """The loop of one core. `commands` and `reports` are ZeroMQ sockets; `send` is the only way out."""

    def __init__(self, core: EngineCore, executor: CountingExecutor, commands: zmq.Socket[bytes], reports: Reports) -> None:
        self.core = core
        self.executor = executor
        self.commands = commands
        self.reports = reports
        self.step_began: float | None = None
        self._open: set[str] = set()  # requests the front end waits for
        self._is_stopping = False
        self._is_idle_told = True

    def run(self) -> None:
        while not self._is_stopping:
            self._take_commands()
            if not self.core.has_unfinished_requests():
                continue
            self.step_began = time.monotonic()
            outputs = self._step()
            self.step_began = None
            self._open.difference_update(news.request_id for news in outputs if news.finish_reason is not None)
            self.reports.send(wire.Outputs(outputs, self._stats()))
            self._is_idle_told = False

    def _take_commands(self) -> None:
        """All there are; with nothing to compute, wait for one."""
        if not self.core.has_unfinished_requests():
            if not self.commands.poll(0) and not self._is_idle_told:  # aborts have changed the counts since the last step
                self.reports.send(wire.Outputs([], self._stats()))
                self._is_idle_told = True
            self.commands.poll()
        while not self._is_stopping and self.commands.poll(0):
            self._obey(wire.decode_command(self.commands.recv()))

    def _obey(self, command: wire.Command) -> None:
        if isinstance(command, wire.Add):
            request_id = command.request.request_id
            try:
                self.core.add_request(command.request)
                self._open.add(request_id)
            except Exception as error:  # also a broken part: it is this request that found it
                is_users = isinstance(error, ValueError)
                self.reports.send(wire.Refused(request_id, str(error) if is_users else f"{type(error).__name__}: {error}"))
        elif isinstance(command, wire.Abort):
            self._open.difference_update(command.request_ids)
            try:
                self.core.abort_requests(command.request_ids, command.reason)
            except Exception:  # a part that fails to free: the request is gone all the same
                logger.exception("Aborting %d requests failed", len(command.request_ids))
        elif isinstance(command, wire.Call):
            self.reports.send(wire.Reply(command.call_id, self._answer(command.method)))
        else:
            self._is_stopping = True

    def _step(self) -> list[EngineCoreOutput]:
        """One step. A part that breaks (not a failed forward, of which the core fails the requests alone) ends all requests."""
        try:
            return self.core.step()
        except ExecutorDeadError:
            raise
        except Exception as error:
            logger.exception("A step broke off; its %d requests fail", len(self._open))
            message = f"A step of the engine broke off: {type(error).__name__}: {error}"
            for request_id in self._open:
                with contextlib.suppress(Exception):  # it may break again; the first error tells more
                    self.core.abort_requests([request_id])
            return [EngineCoreOutput(i, finish_reason=FinishReason.ERROR, error=message) for i in self._open]

    def _stats(self) -> wire.CoreStats:
        """Replaced parts may lack what ours have beyond their contract: their counts are 0 then."""
        scheduler = self.core.scheduler
        num_running = len(getattr(scheduler, "running", ()))
        pool = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
        stats = self.executor.take_counts()
        stats.num_running = num_running
        stats.num_waiting = len(scheduler.requests) - num_running
        stats.num_free_blocks = getattr(pool, "num_free_blocks", 0)
        return stats

    def _answer(self, method: str) -> Any:
        if method == "reset_prefix_cache":
            return self.core.reset_prefix_cache()
        return {"num_blocks": self.executor.num_blocks - 1, "requests": [self._describe(r) for r in self._in_order()]}

    def _in_order(self) -> list[Any]:
        """Open requests, the running ones first."""
        scheduler = self.core.scheduler
        running = list(getattr(scheduler, "running", ()))
        return running + [request for request in scheduler.requests.values() if request not in running]

    def _describe(self, request: Any) -> dict[str, Any]:
        block_ids: list[int] = []
        with contextlib.suppress(Exception):  # a waiting request has no table; a replaced manager may not say
            block_ids = list(self.core.scheduler.kv_cache_manager.get_block_ids(request))
        return {
            "request_id": request.request_id,
            "status": request.status.value,
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_output_tokens": request.num_output_tokens,
            "num_computed_tokens": request.num_computed_tokens,
            "num_cached_tokens": max(0, request.num_cached_tokens),
            "num_preemptions": request.num_preemptions,
            "block_ids": block_ids,
        }


class CountingExecutor:
    """An executor that reads the work orders that pass through it: what the metrics count is all in there."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.num_blocks = inner.num_blocks
        self._counts = wire.CoreStats()

    def submit(self, scheduler_output: SchedulerOutput) -> None:
        counts = self._counts
        counts.num_tokens += scheduler_output.total_num_scheduled_tokens
        counts.num_preempted += len(scheduler_output.preempted_req_ids)
        for new in scheduler_output.scheduled_new_reqs:
            if len(new.token_ids) == new.num_prompt_tokens:  # else it is back from a preemption, and would find its own blocks
                counts.prefix_queries += new.num_prompt_tokens
                counts.prefix_hits += new.num_computed_tokens
        self.inner.submit(scheduler_output)

    def sample(self, grammar_mask: Any = None) -> StepHandle:
        return self.inner.sample(grammar_mask)

    def shutdown(self) -> None:
        self.inner.shutdown()

    def take_counts(self) -> wire.CoreStats:
        counts, self._counts = self._counts, wire.CoreStats()
        return counts


class Reports:
    """The way to the front end. A ZeroMQ socket belongs to one thread; the log and the heartbeat come from any, so it is
    locked."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._lock = threading.Lock()

    def send(self, report: wire.Report) -> None:
        data = wire.encode(report)
        with self._lock:
            if not self._socket.closed:
                self._socket.send(data)

    def close(self, linger_ms: int) -> None:
        """Nothing is sent any more; what was has so long to leave."""
        with self._lock:
            self._socket.close(linger_ms)


class _LogToReports(logging.Handler):
    def __init__(self, reports: Reports) -> None:
        super().__init__(logging.INFO)
        self._reports = reports

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):
            self._reports.send(wire.Progress(record.levelno, self.format(record)))


# ---------------------------------------------------------------- start


def main() -> int:
    for name in ("SIGINT", "SIGTERM"):  # Ctrl-C reaches every process of a terminal: the front end decides what it means
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    launch = wire.parse_launch_line(sys.stdin.buffer.readline())
    context = zmq.Context()
    commands, reports_socket = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (commands, reports_socket):
        socket.set_hwm(0)  # without a limit: the front end is fast, and a full queue would block a step
    commands.connect(launch.commands)
    reports_socket.connect(launch.reports)
    reports = Reports(reports_socket)
    logger.setLevel(logging.INFO)
    logger.addHandler(_LogToReports(reports))
    logger.propagate = False
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        loop = CoreLoop(*_build(launch, reports), commands, reports)
    except Exception as error:
        is_users = isinstance(error, (ValueError, OSError, ImportError))
        if not is_users:
            logging.getLogger().exception("The engine core failed to start")
        reports.send(wire.Failed(str(error) if is_users else f"{type(error).__name__}: {error}", is_users))
        reports.close(linger_ms=2000)
        context.destroy(linger=2000)
        return 1
    threading.Thread(target=_beat, args=(loop, reports), daemon=True).start()
    try:
        loop.run()
    except ExecutorDeadError:
        logger.exception("The engine core ends: it cannot compute any more")
        reports.close(linger_ms=2000)
        context.destroy(linger=2000)
        return 1
    loop.executor.shutdown()
    reports.close(linger_ms=0)
    context.destroy(linger=0)
    return 0


def _build(launch: wire.Launch, reports: Reports) -> tuple[EngineCore, CountingExecutor]:
    """Load the model and build the core; a Ready goes out."""
    components = Components.from_dir(launch.components) if launch.components else Components()
    runner: Any
    if echo_model.is_echo(launch.config.model):
        runner = echo_model.make_executor(launch.config)
        config = launch.config.resolved("cpu")
        vocab_size, model_max_len, eos = echo_model.make_tokenizer().vocab_size, echo_model.MAX_MODEL_LEN, ()
        logger.info("The echo model, KV cache of %d blocks of %d", runner.num_blocks, config.block_size)
    else:
        from minivllm.worker.model_runner import ModelRunner  # torch

        runner = ModelRunner(launch.config, components)
        config = launch.config.resolved(runner.device_type)
        vocab_size, model_max_len = runner.vocab_size, runner.model_config.max_position_embeddings
        eos = runner.model_config.eos_token_ids
    executor = CountingExecutor(runner)
    config = apply_capabilities(config, components).fit_max_model_len(model_max_len, executor.num_blocks)
    core = EngineCore(config, executor, components, vocab_size)
    if hasattr(runner, "warm_up"):
        logger.info("Warming up.")
        runner.warm_up()
    parts = {name: _describe_part(part) for name, part in components.items()}
    reports.send(wire.Ready(core.config, vocab_size, list(eos), executor.num_blocks, parts))
    return core, executor


def _describe_part(part: Any) -> wire.Part:
    capabilities = getattr(part, "capabilities", None)
    return wire.Part(
        getattr(part, "__module__", "?"),
        getattr(part, "__qualname__", type(part).__name__),
        None if capabilities is None else sorted(capabilities),
    )


def _beat(loop: CoreLoop, reports: Reports) -> None:
    while True:
        began = loop.step_began
        reports.send(wire.Heartbeat(0.0 if began is None else time.monotonic() - began))
        time.sleep(HEARTBEAT_SECONDS)


def _end_with_stdin() -> None:
    """The front end holds the other end of stdin; however it dies, the system closes it."""
    while os.read(0, 4096):  # not sys.stdin: its lock would be held while Python shuts down
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
