"""`speculative_config`: vLLM's names, checked; what is wrong or not served is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minivllm import LLM
from minivllm.cli import main
from minivllm.components import Components
from minivllm.config import EngineConfig
from minivllm.core.engine_core import EngineCore
from minivllm.core.scheduler import Scheduler
from minivllm.sim.echo import EchoExecutor
from minivllm.spec_decode.config import SpeculativeConfig
from minivllm.spec_decode.stats import SpecDecodeStats
from tests.spec_decode.harness import GREEDY, make_runner, many_prompts, run, save_model

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def config(**changes: Any) -> SpeculativeConfig:
    return SpeculativeConfig.from_dict({k: v for k, v in {**NGRAM, **changes}.items() if v is not ...})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "medusa"}, r"method='medusa' is not one of 'ngram', 'draft_model', 'eagle'"),
        ({"method": ...}, "needs 'method', as in"),
        ({"num_speculative_tokens": ...}, "needs 'num_speculative_tokens'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be an integer of at least 1, got 0"),
        ({"num_speculative_tokens": True}, "got True"),
        ({"num_speculative_tokens": 2.5}, "got 2.5"),
        ({"num_spec_tokens": 3}, "no setting 'num_spec_tokens'. Did you mean 'num_speculative_tokens'"),
        ({"model": "x"}, "method='ngram' needs no model"),
        ({"method": "draft_model"}, "method='draft_model' needs model"),
        ({"method": "draft_model", "model": ""}, "model must be a name or a path, got ''"),
        ({"method": "eagle", "prompt_lookup_max": 3}, "prompt_lookup_max is of method='ngram'"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max must be an integer of at least 1"),
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, "prompt_lookup_min=3 is larger than prompt_lookup_max=2"),
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size=2 is not supported"),
        ({"speculative_token_tree": "[]"}, "speculative_token_tree='\\[\\]' is not supported"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(**changes)


def test_a_config_that_is_no_dict_is_refused() -> None:
    with pytest.raises(ValueError, match="speculative_config must be a dict such as"):
        EngineConfig.from_kwargs(speculative_config="ngram")


@pytest.mark.parametrize(
    ("given", "lookup"), [({}, (5, 2)), ({"prompt_lookup_max": 1}, (1, 1)), ({"prompt_lookup_min": 8}, (8, 8))], ids=str
)
def test_the_lookup_lengths_that_are_not_given_fit_the_other(given: dict[str, int], lookup: tuple[int, int]) -> None:
    made = config(**given)
    assert (made.prompt_lookup_max, made.prompt_lookup_min) == lookup


def test_what_asks_for_nothing_is_taken() -> None:
    assert config(draft_tensor_parallel_size=1, quantization=None) == config()
    assert EngineConfig.from_kwargs(speculative_config=None).speculative_config is None


def test_more_drafts_than_a_step_has_tokens_are_refused_with_the_two_numbers() -> None:
    with pytest.raises(ValueError, match=r"num_speculative_tokens=8 drafts .* max_num_batched_tokens=8"):
        EngineConfig.from_kwargs(speculative_config={**NGRAM, "num_speculative_tokens": 8}, max_num_batched_tokens=8)


def test_a_scheduler_that_gives_one_token_a_step_is_refused() -> None:
    class OneToken(Scheduler):
        capabilities = frozenset({"stops", "whole prompts", "preemption"})

    settings = EngineConfig.from_kwargs(speculative_config=NGRAM, block_size=4, max_model_len=32).resolved("cpu")
    with pytest.raises(ValueError, match="speculative_config with method='ngram' needs 'mixed batches'"):
        EngineCore(settings, EchoExecutor(101, 4), Components({"scheduler": OneToken}))


def test_the_command_line_takes_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "x", "--speculative-config", "{method: ngram}"])
    assert "is not JSON" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["generate", "x", "--speculative-config", "3"])
    assert "is no JSON object" in capsys.readouterr().err
    assert main(["generate", "x", "--speculative-config", '{"method": "tea", "num_speculative_tokens": 1}']) == 1
    assert "method='tea' is not one of" in capsys.readouterr().err


# ---------------------------------------------------------------- stats


def test_stats_count_by_position_and_with_the_targets_own_token() -> None:
    stats = SpecDecodeStats()
    stats.count([3, 3, 1], [4, 2, 1])
    assert (stats.drafted, stats.accepted) == ([3, 2, 2], [2, 1, 1])
    assert stats.acceptance == [2 / 3, 1 / 2, 1 / 2]
    assert stats.tokens_per_step == 7 / 3
    assert "3 verifications, 2.33 tokens each" in stats.describe()
    stats.reset()
    assert stats == SpecDecodeStats()
    assert stats.tokens_per_step == 0


def test_an_llm_has_stats_if_it_speculates(tmp_path: Path) -> None:
    folder = str(save_model(tmp_path))
    options: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 40}
    with LLM(folder, **options) as llm:
        assert llm.spec_decode_stats is None
    with LLM(folder, speculative_config={**NGRAM, "prompt_lookup_min": 1}, **options) as llm:
        llm.generate([[1, 2, 1, 2, 1, 2]], GREEDY, use_tqdm=False)
        assert llm.spec_decode_stats is not None
        assert llm.spec_decode_stats.num_verifications > 0
        assert llm.spec_decode_stats.draft_s > 0


# ---------------------------------------------------------------- parts of one's own


class Fixed:
    proposes: Any = (1, 2)

    def __init__(self, prompt_lookup_max: int, prompt_lookup_min: int) -> None:
        pass

    def propose(self, token_ids: np.ndarray, k: int) -> Any:
        return self.proposes


@pytest.mark.parametrize("proposal", [[1, 2, 3, 4], [-1], [2**40], 7, ["a"]], ids=str)
def test_a_drafter_that_proposes_nonsense_is_named(tmp_path: Path, proposal: Any) -> None:
    part = type("Fixed", (Fixed,), {"proposes": proposal})
    runner = make_runner(save_model(tmp_path), {"drafter": part}, speculative_config=NGRAM)
    with pytest.raises(AssertionError, match=r"The drafter .*Fixed proposed .* at most 3 token ids below 101"):
        run(runner, [[1, 2, 3]])


def test_token_ids_beyond_the_vocabulary_are_named(tmp_path: Path) -> None:
    part = type("Fixed", (Fixed,), {"proposes": [101]})
    runner = make_runner(save_model(tmp_path), {"drafter": part}, speculative_config=NGRAM)
    with pytest.raises(AssertionError, match=r"proposed \[101\] .* below 101"):
        run(runner, [[1, 2, 3]])


def test_an_array_of_drafts_will_do(tmp_path: Path) -> None:
    part = type("Fixed", (Fixed,), {"proposes": np.array([1, 2])})
    model = save_model(tmp_path)
    assert run(make_runner(model, {"drafter": part}, speculative_config=NGRAM), many_prompts()) == run(
        make_runner(model), many_prompts()
    )
