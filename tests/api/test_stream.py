"""LLM.stream: deltas add up, streams do not mix or stall one another, and what is closed or dropped is aborted."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from minivllm import LLM, SamplingParams
from minivllm.outputs import RequestOutput
from minivllm.text.tokenizer import REPLACEMENT, Tokenizer
from tests.api.harness import assert_idle, ids_of_bytes, make_llm, num_free_blocks

GREEDY = SamplingParams(temperature=0, max_tokens=30)


@pytest.fixture
def llm(tokenizer: Tokenizer) -> LLM:
    return make_llm(tokenizer)


def joined(deltas: list[RequestOutput]) -> tuple[str, list[int]]:
    text = "".join(delta.outputs[0].text for delta in deltas)
    return text, [token for delta in deltas for token in delta.outputs[0].token_ids]


@pytest.mark.parametrize("stop", [None, "e", "the quick"])
def test_deltas_add_up_to_what_generate_gives(tokenizer: Tokenizer, stop: str | None) -> None:
    """Case 23."""
    llm = make_llm(tokenizer, script=tokenizer.encode("see naïve 日本 😀 and the quick brown fox and the lazy dog") * 3)
    params = SamplingParams(temperature=0, max_tokens=30, stop=stop, logprobs=1)
    whole = llm.generate("the", params, use_tqdm=False)[0]
    deltas = list(llm.stream("the", params))
    assert joined(deltas) == (whole.outputs[0].text, whole.outputs[0].token_ids)
    last = deltas[-1]
    assert last.outputs[0].finish_reason == whole.outputs[0].finish_reason
    assert last.outputs[0].stop_reason == whole.outputs[0].stop_reason
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert [delta.outputs[0].finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert [row for delta in deltas for row in delta.outputs[0].logprobs or []] == whole.outputs[0].logprobs
    assert last.outputs[0].cumulative_logprob == pytest.approx(whole.outputs[0].cumulative_logprob)
    assert_idle(llm)


def test_an_emoji_split_over_tokens_is_never_shown_in_halves(tokenizer: Tokenizer) -> None:
    """Case 24."""
    script = ids_of_bytes(tokenizer, "a😀b👩‍👩‍👧".encode())
    llm = make_llm(tokenizer, script=script)
    texts = [delta.outputs[0].text for delta in llm.stream("the", SamplingParams(temperature=0, max_tokens=len(script)))]
    assert "".join(texts) == "a😀b👩‍👩‍👧"
    assert not any(REPLACEMENT in text for text in texts)


def test_a_run_of_lone_bytes_does_not_stall_a_stream(tokenizer: Tokenizer) -> None:
    """Case 24."""
    llm = make_llm(tokenizer, script=ids_of_bytes(tokenizer, b"\x80" * 20))
    texts = [delta.outputs[0].text for delta in llm.stream("the", SamplingParams(temperature=0, max_tokens=20))]
    assert texts == [REPLACEMENT] * 20


def test_two_streams_read_in_turns_each_get_their_own_tokens(llm: LLM) -> None:
    """Case 13."""
    alone = [joined(list(llm.stream(prompt, GREEDY))) for prompt in ("the fox", "a dog")]
    first, second = llm.stream("the fox", GREEDY), llm.stream("a dog", GREEDY)
    deltas: tuple[list[RequestOutput], list[RequestOutput]] = ([], [])
    for one, other in zip(first, second, strict=True):
        deltas[0].append(one)
        deltas[1].append(other)
    assert [joined(d) for d in deltas] == alone
    assert {delta.request_id for delta in deltas[0]} != {delta.request_id for delta in deltas[1]}


def test_a_consumer_that_stops_reading_does_not_stall_the_other(llm: LLM) -> None:
    """Case 13."""
    slow, fast = llm.stream("the fox", GREEDY), llm.stream("a dog", GREEDY)
    next(slow)
    assert len(joined(list(fast))[1]) == 30
    assert len(joined(list(slow))[1]) == 29  # nothing was lost meanwhile


def test_generate_while_a_stream_is_open(llm: LLM) -> None:
    alone = joined(list(llm.stream("the fox", GREEDY)))
    stream = llm.stream("the fox", GREEDY)
    first = next(stream)
    assert len(llm.generate(["a", "b"], GREEDY, use_tqdm=False)) == 2
    assert joined([first, *stream]) == alone
    assert_idle(llm)


@pytest.mark.parametrize("num_read", [0, 3])
def test_closing_a_stream_aborts_its_request_and_frees_its_blocks(llm: LLM, num_read: int) -> None:
    stream = llm.stream([7] * 40, GREEDY)
    for _ in range(num_read):
        next(stream)
    assert num_read == 0 or num_free_blocks(llm) < 64
    stream.close()
    assert_idle(llm)
    assert list(stream) == []
    stream.close()


def test_leaving_the_loop_or_the_with_block_aborts(llm: LLM) -> None:
    with llm.stream("the fox", GREEDY) as stream:
        for _ in stream:
            break
    assert_idle(llm)


def test_dropping_a_stream_aborts(llm: LLM) -> None:
    stream = llm.stream("the fox", GREEDY)
    next(stream)
    del stream
    gc.collect()
    assert_idle(llm)


def test_a_stream_collected_in_the_middle_of_a_step_is_aborted_after_it(tokenizer: Tokenizer) -> None:
    streams: list[Any] = []
    llm = make_llm(tokenizer, fault=lambda step: streams.clear())  # type: ignore[arg-type, return-value]
    streams.append(llm.stream("a dog", GREEDY))
    kept = llm.stream("the fox", GREEDY)
    assert len(joined(list(kept))[1]) == 30
    llm.reset_prefix_cache()
    assert_idle(llm)


def test_a_bad_prompt_is_refused_at_the_call(llm: LLM) -> None:
    with pytest.raises(ValueError, match="empty"):
        llm.stream("")
    with pytest.raises(ValueError, match="token ids must be integers"):
        llm.stream(["two", "prompts"])  # type: ignore[list-item]
    assert_idle(llm)


def test_a_conversation_can_be_streamed(llm: LLM) -> None:
    messages = [{"role": "user", "content": "the fox"}]
    whole = llm.chat(messages, GREEDY, use_tqdm=False)[0]
    assert joined(list(llm.stream(messages, GREEDY))) == (whole.outputs[0].text, whole.outputs[0].token_ids)


def test_a_stream_of_an_engine_that_was_shut_down_says_so(llm: LLM) -> None:
    stream = llm.stream("the fox", GREEDY)
    next(stream)
    llm.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        next(stream)
