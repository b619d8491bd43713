"""What goes wrong while the engine runs stays as small as it is: Ctrl-C, a failed forward, a broken part."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest

from minivllm import LLM, SamplingParams
from minivllm.components import Components
from minivllm.core.block_pool import BlockPool
from minivllm.core.step import SchedulerOutput
from minivllm.text.detokenizer import IncrementalDetokenizer
from minivllm.text.tokenizer import Tokenizer
from tests.api.harness import assert_idle, make_llm

GREEDY = SamplingParams(temperature=0, max_tokens=8)


class At:
    """A fault at one step of the executor."""

    def __init__(self, step: int, action: Any) -> None:
        self.countdown, self.action = step, action

    def __call__(self, step: SchedulerOutput) -> Any:
        self.countdown -= 1
        return self.action(step) if self.countdown == 0 else None


def answers(llm: LLM) -> bool:
    output = llm.generate("the fox", GREEDY, use_tqdm=False)[0]
    return output.error is None and len(output.outputs[0].token_ids) == 8


def test_ctrl_c_ends_generate_after_the_step_and_leaves_the_engine_usable(tokenizer: Tokenizer) -> None:
    finished_steps: list[int] = []
    fault = At(3, lambda step: signal.raise_signal(signal.SIGINT))
    llm = make_llm(tokenizer, fault=fault)
    step = llm.engine_core.step
    llm.engine_core.step = lambda: (step(), finished_steps.append(1))[0]  # type: ignore[method-assign, func-returns-value]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["the fox", "a dog"], GREEDY, use_tqdm=False)
    assert len(finished_steps) == 3  # the one it fell into came to its end
    assert_idle(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert answers(llm)


def test_a_second_ctrl_c_does_not_wait_for_the_step(tokenizer: Tokenizer) -> None:
    def twice(step: SchedulerOutput) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second one must not come back")

    llm = make_llm(tokenizer, fault=At(3, twice))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["the fox", "a dog"], GREEDY, use_tqdm=False)
    assert_idle(llm)
    assert answers(llm)


def test_ctrl_c_in_generate_leaves_an_open_stream_alone(tokenizer: Tokenizer) -> None:
    llm = make_llm(tokenizer, fault=At(3, lambda step: signal.raise_signal(signal.SIGINT)))
    stream = llm.stream("the fox", GREEDY)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a dog", GREEDY, use_tqdm=False)
    assert sum(len(delta.outputs[0].token_ids) for delta in stream) == 8
    assert_idle(llm)


def test_a_handler_of_one_s_own_is_called_after_the_step_and_stays(tokenizer: Tokenizer) -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: called.append(signum))
    try:
        llm = make_llm(tokenizer, fault=At(3, lambda step: signal.raise_signal(signal.SIGINT)))
        assert answers(llm)
        assert called == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_generate_works_in_another_thread(tokenizer: Tokenizer) -> None:
    llm = make_llm(tokenizer)
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(answers(llm)))
    thread.start()
    thread.join()
    assert results == [True]


def test_a_failed_forward_fails_the_requests_of_its_step_and_no_others(tokenizer: Tokenizer) -> None:
    def fail(step: SchedulerOutput) -> None:
        raise RuntimeError("out of memory")

    llm = make_llm(tokenizer, fault=At(3, fail), max_num_seqs=2)
    outputs = llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error", "length"]
    assert outputs[0].error is not None and "out of memory" in outputs[0].error
    assert len(outputs[0].outputs[0].token_ids) == 2  # what it had before
    assert_idle(llm)
    assert answers(llm)


def test_a_request_that_fails_alone_does_not_take_its_neighbours_along(tokenizer: Tokenizer) -> None:
    fault = At(2, lambda step: {next(iter(step.num_scheduled_tokens)): "NaN in the logits"})
    llm = make_llm(tokenizer, fault=fault)
    bad, good = llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert (bad.outputs[0].finish_reason, bad.error) == ("error", "NaN in the logits")
    assert good.outputs[0].finish_reason == "length"


def test_the_failure_of_a_stream_is_its_last_delta(tokenizer: Tokenizer) -> None:
    llm = make_llm(tokenizer, fault=At(2, lambda step: {next(iter(step.num_scheduled_tokens)): "NaN in the logits"}))
    *_, last = llm.stream("a", GREEDY)
    assert (last.finished, last.outputs[0].finish_reason, last.error) == (True, "error", "NaN in the logits")


def test_a_broken_detokenizer_ends_the_call_and_the_engine_lives(tokenizer: Tokenizer) -> None:
    class Broken(IncrementalDetokenizer):
        pushes = 0

        def push(self, token_id: int) -> str:
            Broken.pushes += 1
            if Broken.pushes == 5:
                raise NotImplementedError("Exercise 11.1")
            return super().push(token_id)

    llm = make_llm(tokenizer, components=Components({"detokenizer": Broken}))
    stream = llm.stream("the fox", GREEDY)
    with pytest.raises(NotImplementedError, match=r"11\.1"):
        llm.generate(["the fox", "a dog"], GREEDY, use_tqdm=False)
    assert_idle(llm)
    with pytest.raises(RuntimeError, match="a step broke off"):
        list(stream)
    assert answers(llm)


def test_after_shutdown_calls_are_refused(tokenizer: Tokenizer) -> None:
    with make_llm(tokenizer) as llm:
        assert answers(llm)
    llm.shutdown()  # twice is fine
    for call in (lambda: llm.generate("a"), lambda: llm.stream("a"), lambda: llm.chat([{"role": "user", "content": "a"}])):
        with pytest.raises(RuntimeError, match="shut down"):
            call()


def test_threads_that_call_at_once_take_turns(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(tokenizer)
    prompts = [f"the fox {i}" for i in range(6)]
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0] for prompt in prompts]
    sample = llm.engine_core.executor.sample
    monkeypatch.setattr(llm.engine_core.executor, "sample", lambda: (time.sleep(1e-3), sample())[1])  # others get in here
    answers_of: dict[int, list[Any]] = {i: [] for i in range(6)}

    def call(i: int) -> None:
        for _ in range(10):
            answers_of[i].append(llm.generate(prompts[i], GREEDY, use_tqdm=False)[0].outputs[0])

    threads = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers_of == {i: [alone[i]] * 10 for i in range(6)}
    assert_idle(llm)


def test_a_detokenizer_that_cannot_be_built_leaves_no_request_behind(tokenizer: Tokenizer) -> None:
    class Unbuilt(IncrementalDetokenizer):
        def __init__(self, tokenizer: Tokenizer) -> None: ...

    llm = make_llm(tokenizer, components=Components({"detokenizer": Unbuilt}))
    with pytest.raises(TypeError, match="prompt_token_ids"):
        llm.generate(["the fox", "a dog"], GREEDY, use_tqdm=False)
    assert_idle(llm)


def test_a_pool_that_fails_to_free_ends_the_call_with_its_own_error_and_the_engine_lives(tokenizer: Tokenizer) -> None:
    class Broken(BlockPool):
        num_calls = 0

        def free(self, blocks: Any) -> None:
            Broken.num_calls += 1
            if Broken.num_calls <= 2:
                raise NotImplementedError("Exercise 4.2")
            super().free(blocks)

    llm = make_llm(tokenizer, components=Components({"block_pool": Broken}))
    with pytest.raises(NotImplementedError, match=r"4\.2"):
        llm.generate(["the fox", "a dog"], GREEDY, use_tqdm=False)
    assert not llm.engine_core.has_unfinished_requests()
    assert answers(llm)
