"""`minivllm bench spec`: its workloads, and what it refuses. The figures are not tested."""

from __future__ import annotations

import pytest

from minivllm.bench.spec import METHODS, WORKLOADS, main, workload
from minivllm.spec_decode.config import SpeculativeConfig


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_has_as_many_prompts_as_asked_for(name: str) -> None:
    assert len(workload(name, 7)) == 7
    assert workload(name, 7)[:3] == workload(name, 3)


def test_its_methods_are_right_settings() -> None:
    for settings in METHODS.values():
        assert settings is None or SpeculativeConfig.from_dict(settings).num_speculative_tokens == 3


@pytest.mark.parametrize("flags", [["--rounds", "0"], ["--batch-sizes", "0"], ["--max-tokens", "1"], ["--workloads", "tea"]])
def test_wrong_flags_end_it_before_a_model_is_loaded(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(flags)
    assert "usage: minivllm bench spec" in capsys.readouterr().err
