"""llm.trace: on when asked for, keyed by the ids the user sees, and the same answers with and without."""

from __future__ import annotations

import subprocess
import sys

import pytest

from minivllm import SamplingParams
from minivllm.config import EngineConfig
from minivllm.core.engine_core import EngineCore
from minivllm.text.tokenizer import Tokenizer
from tests.api.harness import ids_of_bytes, make_llm
from tests.text.small_tokenizers import make_byte_level

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_byte_level()


def test_a_trace_is_kept_when_asked_for(tokenizer: Tokenizer):
    llm = make_llm(tokenizer, trace=True)
    outputs = llm.generate(["the fox", "a dog"], GREEDY, use_tqdm=False)
    assert llm.trace is not None
    for output in outputs:
        record = llm.trace.requests[output.request_id]
        said = [t for step in llm.trace.steps for t in step.sampled.get(output.request_id, [])]
        assert said == output.outputs[0].token_ids and record.num_output_tokens == 5
        assert record.num_prompt_tokens == len(output.prompt_token_ids)


def test_several_calls_are_one_trace_until_it_is_cleared(tokenizer: Tokenizer):
    llm = make_llm(tokenizer, trace=True)
    llm.generate(["the fox"], GREEDY, use_tqdm=False)
    (output,) = llm.generate(["the fox"], GREEDY, use_tqdm=False)
    assert llm.trace is not None and list(llm.trace.requests) == ["0", "1"]
    assert llm.trace.requests["1"].num_cached_tokens == output.num_cached_tokens
    llm.trace.clear()
    llm.generate(["a dog"], GREEDY, use_tqdm=False)
    assert list(llm.trace.requests) == ["2"] and llm.trace.steps[0].index == 0


def test_without_it_there_is_none_and_nothing_of_it_is_imported(tokenizer: Tokenizer):
    llm = make_llm(tokenizer)
    assert llm.trace is None and type(llm.engine_core) is EngineCore
    code = "import sys, minivllm.llm; assert not [m for m in sys.modules if m.startswith('minivllm.observe')]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_answers_are_the_same_with_and_without(tokenizer: Tokenizer):
    prompts = ["the fox", "the fox jumps over the lazy dog", "a", "the fox jumps"]
    settings = {"num_blocks": 14, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    plain, watched = (make_llm(tokenizer, trace=trace, **settings) for trace in (False, True))
    answers = [llm.generate(prompts, GREEDY, use_tqdm=False) for llm in (plain, watched)]
    assert [o.outputs for o in answers[0]] == [o.outputs for o in answers[1]]


def test_a_stop_string_is_a_stop_in_the_trace(tokenizer: Tokenizer):
    """To the core it is an abort; its user sees finish_reason "stop"."""
    llm = make_llm(tokenizer, trace=True, script=ids_of_bytes(tokenizer, b"one two three"))
    (output,) = llm.generate(["x"], SamplingParams(max_tokens=13, stop="two"), use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert llm.trace is not None and llm.trace.requests["0"].finish_reason == "stop"
    assert llm.trace.steps[-1].finished == ["0"] and llm.trace.steps[-1].blocks == {}


def test_a_dropped_stream_is_an_abort_in_the_trace(tokenizer: Tokenizer):
    llm = make_llm(tokenizer, trace=True)
    with llm.stream("the fox", GREEDY) as stream:
        next(stream)
    assert llm.trace is not None and llm.trace.requests["0"].finish_reason == "abort"


def test_several_completions_of_a_prompt_are_told_apart(tokenizer: Tokenizer):
    llm = make_llm(tokenizer, trace=True)
    llm.generate(["the fox"], SamplingParams(n=2, max_tokens=3, temperature=1.0, ignore_eos=True), use_tqdm=False)
    assert llm.trace is not None and list(llm.trace.requests) == ["0", "0#2"]


def test_a_wrong_value_is_refused_by_name():
    with pytest.raises(ValueError, match="trace must be True or False, got 1"):
        EngineConfig(trace=1)  # type: ignore[arg-type]
