"""OutputRouter beside a slow obvious model: who opens, reads, leaves or is failed, in any order, gets its own tokens, once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minivllm.serving.async_llm import OutputRouter, OutputStream
from tests.serving.test_async_llm import delta


class RouterMachine(RuleBasedStateMachine):
    """The model of a stream: the tokens that came and were not read, and how it ended: "" (it has not), "end", or "error"."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.aborted: list[str] = []
        self.router = OutputRouter(self.aborted.append)
        self.streams: dict[str, OutputStream] = {}
        self.unread: dict[str, list[int]] = {}
        self.over: dict[str, str] = {}
        self.left: list[str] = []
        self.count = 0

    def teardown(self) -> None:
        self.streams.clear()
        self.loop.close()

    def now(self, work: Awaitable[Any]) -> Any:
        """The result of something that must not have to wait."""
        return self.loop.run_until_complete(asyncio.wait_for(work, 1))

    def open_ones(self) -> list[str]:
        return [name for name in self.streams if not self.over[name]]

    @rule()
    def open(self) -> None:
        name = f"r{len(self.over)}"
        self.streams[name] = self.router.open(name)
        self.unread[name], self.over[name] = [], ""

    @precondition(lambda self: self.over)
    @rule(data=st.data(), finished=st.booleans())
    def output(self, data: st.DataObject, finished: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.over)))
        self.count += 1
        self.router.route(name, delta(name, self.count, finished))
        if not self.over[name]:
            self.unread[name].append(self.count)
            self.over[name] = "end" if finished else ""

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.streams)))
        if self.unread[name]:
            output = self.now(anext(self.streams[name]))
            assert output.outputs[0].token_ids == self.unread[name]
            self.unread[name] = []
        elif self.over[name]:
            with pytest.raises(StopAsyncIteration if self.over[name] == "end" else RuntimeError):
                self.now(anext(self.streams[name]))

    @precondition(lambda self: self.open_ones())
    @rule(data=st.data(), end=st.sampled_from(["output", "close", "fail"]))
    def end_while_somebody_waits(self, data: st.DataObject, end: str) -> None:
        name = data.draw(st.sampled_from(self.open_ones()))
        if self.unread[name]:
            return
        reading = self.loop.create_task(self.streams[name].__anext__())
        self.loop.run_until_complete(asyncio.sleep(0))
        if end == "close":
            self.streams[name].close()
            self.left.append(name)
        elif end == "fail":
            self.router.fail(RuntimeError("broken"), name)
        else:
            self.router.route(name, delta(name, -1, finished=True))
            assert self.now(reading).outputs[0].token_ids == [-1]
        if end != "output":
            with pytest.raises(StopAsyncIteration if end == "close" else RuntimeError):
                self.now(reading)
        self.over[name] = "error" if end == "fail" else "end"

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), drop=st.booleans())
    def leave(self, data: st.DataObject, drop: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.streams)))
        if not self.over[name]:
            self.left.append(name)
        self.over[name] = self.over[name] or "end"
        if drop:
            del self.streams[name]
        else:
            self.streams[name].close()

    @precondition(lambda self: self.over)
    @rule(data=st.data(), everybody=st.booleans())
    def fail(self, data: st.DataObject, everybody: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.over)))
        self.router.fail(RuntimeError("broken"), None if everybody else name)
        for one in list(self.over) if everybody else [name]:
            self.over[one] = self.over[one] or "error"

    @invariant()
    def the_open_are_known_and_leavers_are_aborted_once(self) -> None:
        assert sorted(self.router.queues) == sorted(name for name, how in self.over.items() if not how)
        assert self.aborted == self.left


TestOutputRouter = RouterMachine.TestCase
TestOutputRouter.settings = settings(stateful_step_count=25)
