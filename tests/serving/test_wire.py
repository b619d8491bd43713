"""Messages come out as they went in."""

from __future__ import annotations

import pytest

from minivllm import EngineConfig, SamplingParams
from minivllm.core.step import EngineCoreOutput, EngineCoreRequest, FinishReason, TokenLogprobs
from minivllm.serving import wire

PARAMS = SamplingParams(
    n=2, seed=-(2**63), stop=["é", "x"], logit_bias={5: 1.5}, allowed_token_ids=[1, 2], bad_words=["no"], max_tokens=None
)
REQUEST = EngineCoreRequest("1_a", [1, 2], PARAMS, seed=2**63 + 5, eos_token_ids=(2, 7), cache_salt="s", arrival_time=1.5)
ROW = TokenLogprobs([1, 2], [-0.5, float("-inf")], [1, 2])
NEWS = EngineCoreOutput(
    "1_a", [7], [ROW], prompt_logprobs=[ROW], finish_reason=FinishReason.STOP, stop_reason="x", num_cached_tokens=3
)


@pytest.mark.parametrize(
    "command", [wire.Add(REQUEST), wire.Abort(["a", "b"], FinishReason.STOP), wire.Call(3, "snapshot"), wire.Shutdown()]
)
def test_commands(command: wire.Command) -> None:
    assert wire.decode_command(wire.encode(command)) == command


@pytest.mark.parametrize(
    "report",
    [
        wire.Progress(20, "Loading."),
        wire.Ready(EngineConfig(), 100, [2], 9, {"sampler": wire.Part("m", "S", None)}),
        wire.Failed("no", True),
        wire.Outputs([NEWS, EngineCoreOutput("b", error="failed")], wire.CoreStats(num_running=1)),
        wire.Refused("a", "why"),
        wire.Reply(1, {"requests": [1, 2.5, None]}),
        wire.Heartbeat(0.25),
    ],
)
def test_reports(report: wire.Report) -> None:
    assert wire.decode_report(wire.encode(report)) == report


def test_the_launch_is_one_line() -> None:
    launch = wire.Launch(EngineConfig(model="a\nb"), "/parts", "ipc://a", "ipc://b")
    line = wire.launch_line(launch)
    assert line.count(b"\n") == 1
    assert wire.parse_launch_line(line) == launch
