"""The engine's clock, as a trace reads it: the machine's, or one that says itself how long a step takes. Given to the labs.

With a `VirtualClock` a run of the echo model has times, the same ones on every machine: so schedulers can be compared by TTFT
and ITL where nothing is computed at all. May not know torch or the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from minivllm.observe.trace import StepRecord


class Clock(Protocol):
    """What tells the recorder the time."""

    def now(self) -> float:
        """Seconds, from any moment on."""
        ...

    def computed(self, step: StepRecord) -> None:
        """The forward pass of a step is over; its `tokens` are known."""
        ...

    def sleep_until(self, when: float) -> None:
        """Return when it is `when`; at once if it was."""
        ...


class WallClock:
    """The machine's time."""

    def now(self) -> float:
        return time.perf_counter()

    def computed(self, step: StepRecord) -> None:
        pass

    def sleep_until(self, when: float) -> None:
        while (seconds := when - self.now()) > 0:
            time.sleep(seconds)


def linear_step_time(step: StepRecord) -> float:
    """10 ms a step and 0.1 ms a token: made up, but of the shape real ones have. A step reads all weights once, however few its
    tokens are, and a prompt's tokens cost beyond that."""
    return 0.010 + 0.0001 * step.num_tokens


class VirtualClock:
    """Time that passes only in forward passes, by `step_time(step)` seconds each, and while waiting. All else is free."""

    def __init__(self, step_time: Callable[[StepRecord], float] = linear_step_time) -> None:
        self.step_time = step_time
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def computed(self, step: StepRecord) -> None:
        seconds = self.step_time(step)
        if not seconds >= 0:
            raise ValueError(f"step_time gave {seconds!r} for step {step.index}; it must give seconds, 0 or more.")
        self._now += seconds

    def sleep_until(self, when: float) -> None:
        self._now = max(self._now, when)
