"""LLM.generate over the echo model: what goes in, what comes out, what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, SamplingParams
from minivllm.components import Components
from minivllm.sim.echo import echo_generate
from minivllm.text.detokenizer import IncrementalDetokenizer
from minivllm.text.tokenizer import Tokenizer
from tests.api.harness import assert_idle, ids_of_bytes, make_llm

GREEDY = SamplingParams(temperature=0, max_tokens=8)
QUIET: dict[str, Any] = {"use_tqdm": False}


@pytest.fixture(scope="module")
def llm(tokenizer: Tokenizer) -> LLM:
    return make_llm(tokenizer)


# ---------------------------------------------------------------------- prompts and outputs


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM, tokenizer: Tokenizer) -> None:
    prompts = ["the fox " * n for n in (7, 1, 12, 3)]
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (3, 9, 1, 5)]
    outputs = llm.generate(prompts, params, **QUIET)
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        ids = tokenizer.encode(prompt)
        expected, reason, _ = echo_generate(ids, one, max_model_len=200, vocab_size=tokenizer.vocab_size)
        completion = output.outputs[0]
        assert (output.prompt, output.prompt_token_ids, output.finished) == (prompt, ids, True)
        assert (completion.token_ids, completion.finish_reason, completion.stop_reason) == (expected, reason.value, None)
        assert completion.text == tokenizer.decode(expected)
    assert_idle(llm)


def test_every_shape_of_prompt_gives_the_same_answer(llm: LLM, tokenizer: Tokenizer) -> None:
    text = "the lazy dog"
    ids = tokenizer.encode(text)
    shapes = [text, [text], {"prompt": text}, ids, [ids], tuple(ids), {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]]
    answers = [llm.generate(shape, GREEDY, **QUIET) for shape in shapes]
    assert all(len(answer) == 1 and answer[0].prompt_token_ids == ids for answer in answers)
    assert len({tuple(answer[0].outputs[0].token_ids) for answer in answers}) == 1
    assert [answer[0].prompt for answer in answers] == [text, text, text, None, None, None, None, None]


def test_shapes_can_be_mixed_in_one_list(llm: LLM, tokenizer: Tokenizer) -> None:
    outputs = llm.generate(["the fox", {"prompt": "the fox"}, tokenizer.encode("the fox")], GREEDY, **QUIET)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_token_ids_may_come_with_their_text(llm: LLM) -> None:
    output = llm.generate({"prompt": "shown", "prompt_token_ids": [5, 6]}, GREEDY, **QUIET)[0]
    assert (output.prompt, output.prompt_token_ids) == ("shown", [5, 6])


def test_arrays_are_token_ids(llm: LLM) -> None:
    numpy = pytest.importorskip("numpy")
    for prompt in (numpy.array([5, 6]), numpy.array([[5, 6]]), [numpy.array([5, 6])], list(numpy.array([5, 6]))):
        assert llm.generate(prompt, GREEDY, **QUIET)[0].prompt_token_ids == [5, 6]


def test_request_ids_count_up(tokenizer: Tokenizer) -> None:
    llm = make_llm(tokenizer)
    outputs = llm.generate(["a", "b"], GREEDY, **QUIET) + llm.generate("c", GREEDY, **QUIET)
    assert [output.request_id for output in outputs] == ["0", "1", "2"]


def test_max_tokens_none_goes_on_to_max_model_len(tokenizer: Tokenizer) -> None:
    llm = make_llm(tokenizer, max_model_len=20)
    output = llm.generate("the fox", SamplingParams(temperature=0, max_tokens=None), **QUIET)[0]
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 20
    assert output.outputs[0].finish_reason == "length"


def test_max_tokens_beyond_max_model_len_ends_with_length(tokenizer: Tokenizer) -> None:
    llm = make_llm(tokenizer, max_model_len=20)
    output = llm.generate("the fox", SamplingParams(temperature=0, max_tokens=500), **QUIET)[0]
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 20


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_a_second_prompt_with_the_same_beginning_reports_cached_tokens(tokenizer: Tokenizer, prefix_cache: str) -> None:
    llm = make_llm(tokenizer, prefix_cache=prefix_cache)
    prompt = list(range(10, 22))
    assert llm.generate(prompt, GREEDY, **QUIET)[0].num_cached_tokens == 0
    assert llm.generate(prompt, GREEDY, **QUIET)[0].num_cached_tokens == 8  # two blocks of 4; a third would leave nothing to do
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY, **QUIET)[0].num_cached_tokens == 0


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_cache_salt_keeps_prompts_apart(tokenizer: Tokenizer, prefix_cache: str) -> None:
    llm = make_llm(tokenizer, prefix_cache=prefix_cache)
    prompt = {"prompt_token_ids": list(range(10, 22))}
    cached = [llm.generate({**prompt, "cache_salt": salt}, GREEDY, **QUIET)[0].num_cached_tokens for salt in ("a", "b", "a")]
    assert cached == [0, 0, 8]


def test_times_are_filled_in(llm: LLM) -> None:
    metrics = llm.generate("the fox", GREEDY, **QUIET)[0].metrics
    assert metrics.first_token_time is not None and metrics.finished_time is not None
    assert 0 < metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time


def test_logprobs_are_one_dict_a_token_and_add_up(llm: LLM, tokenizer: Tokenizer) -> None:
    completion = llm.generate("the fox", SamplingParams(temperature=0, max_tokens=3, logprobs=2), **QUIET)[0].outputs[0]
    assert completion.logprobs is not None and len(completion.logprobs) == 3
    for token_id, row in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(row)) == token_id and len(row) == 2
        assert [entry.rank for entry in row.values()] == [1, 2]
        assert row[token_id].decoded_token == tokenizer.token_bytes(token_id).decode(errors="replace")
    total = sum(row[token].logprob for token, row in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)


def test_without_logprobs_there_are_none(llm: LLM) -> None:
    completion = llm.generate("the fox", GREEDY, **QUIET)[0].outputs[0]
    assert completion.logprobs is None and completion.cumulative_logprob is None


def test_changing_params_after_the_call_changes_nothing(tokenizer: Tokenizer) -> None:
    llm = make_llm(tokenizer)
    params = SamplingParams(temperature=0, max_tokens=5)
    stream = llm.stream("the fox", params)
    params.max_tokens = 1
    assert sum(len(delta.outputs[0].token_ids) for delta in stream) == 5


# ---------------------------------------------------------------------- seeds


def seeds_of(tokenizer: Tokenizer, params: list[SamplingParams], **settings: Any) -> list[int]:
    llm = make_llm(tokenizer, **settings)
    seen: dict[str, int] = {}
    llm.engine_core.executor.fault = lambda step: seen.update({new.req_id: new.seed for new in step.scheduled_new_reqs})  # type: ignore[attr-defined]
    llm.generate(["the fox"] * len(params), params, **QUIET)
    return list(seen.values())


def test_requests_without_a_seed_get_different_ones_the_same_in_every_run(tokenizer: Tokenizer) -> None:
    params = [SamplingParams(max_tokens=1)] * 4
    first = seeds_of(tokenizer, params)
    assert len(set(first)) == 4
    assert seeds_of(tokenizer, params) == first
    assert not set(seeds_of(tokenizer, params, seed=1)) & set(first)


def test_a_seed_of_one_s_own_is_used_and_leaves_the_neighbours_theirs(tokenizer: Tokenizer) -> None:
    plain = SamplingParams(max_tokens=1)
    first, second = seeds_of(tokenizer, [plain, plain])
    assert seeds_of(tokenizer, [SamplingParams(max_tokens=1, seed=42), plain, plain]) == [42, first, second]


# ---------------------------------------------------------------------- ends


def test_the_model_s_end_tokens_are_counted_but_not_text(tokenizer: Tokenizer) -> None:
    fox, end = tokenizer.encode("fox"), tokenizer.token_to_id("<|eos|>")
    llm = make_llm(tokenizer, script=[*fox, end, *fox], eos_token_ids=(0, end))
    completion = llm.generate("the", GREEDY, **QUIET)[0].outputs[0]
    assert completion.token_ids == [*fox, end]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("fox", "stop", None)


def test_a_list_of_end_tokens_with_min_tokens_and_with_ignore_eos(tokenizer: Tokenizer) -> None:
    """Case 22."""
    every_token = tuple(range(2, tokenizer.vocab_size))
    ends = every_token[: len(every_token) // 2]  # half of all tokens end the text
    llm = make_llm(tokenizer, eos_token_ids=ends)
    prompts = [[10, i] for i in range(10, 30)]
    plain, least, ignoring = (
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, **more), **QUIET)  # type: ignore[arg-type]
        for more in ({}, {"min_tokens": 5}, {"ignore_eos": True})
    )
    assert any(len(output.outputs[0].token_ids) < 5 for output in plain)
    for output in least:
        token_ids = output.outputs[0].token_ids
        assert not set(token_ids[:5]) & set(ends)
        assert (token_ids[-1] in ends) == (output.outputs[0].finish_reason == "stop")
    assert all(len(output.outputs[0].token_ids) == 12 and output.outputs[0].finish_reason == "length" for output in ignoring)


def test_a_stop_token_id_is_counted_named_and_not_text(tokenizer: Tokenizer) -> None:
    fox, dog = ids_of_bytes(tokenizer, b"fox"), ids_of_bytes(tokenizer, b"dog")
    llm = make_llm(tokenizer, script=[*fox, *dog])
    completion = llm.generate("the", SamplingParams(temperature=0, stop_token_ids=[dog[0]]), **QUIET)[0].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("fox", "stop", dog[0])
    assert completion.token_ids == [*fox, dog[0]]


def test_a_stop_string_across_token_borders_ends_text_and_request(tokenizer: Tokenizer) -> None:
    """Case 23."""
    script = ids_of_bytes(tokenizer, b"Hello world and more")
    llm = make_llm(tokenizer, script=script)
    output = llm.generate("the", SamplingParams(temperature=0, max_tokens=20, stop="lo wor"), **QUIET)[0]
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("Hel", "stop", "lo wor")
    assert completion.token_ids == script[: len("Hello wor")]
    assert_idle(llm)


def test_a_stop_string_on_the_last_token_still_counts(tokenizer: Tokenizer) -> None:
    llm = make_llm(tokenizer, script=ids_of_bytes(tokenizer, b"Hello"))
    completion = llm.generate("the", SamplingParams(temperature=0, max_tokens=5, stop="lo"), **QUIET)[0].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("Hel", "stop", "lo")


def test_a_held_back_end_of_text_is_given_out_at_the_end(tokenizer: Tokenizer) -> None:
    llm = make_llm(tokenizer, script=ids_of_bytes(tokenizer, b"Hello wo"))
    completion = llm.generate("the", SamplingParams(temperature=0, max_tokens=8, stop="lo wor"), **QUIET)[0].outputs[0]
    assert (completion.text, completion.finish_reason) == ("Hello wo", "length")


def test_stop_strings_do_not_count_before_min_tokens(tokenizer: Tokenizer) -> None:
    llm = make_llm(tokenizer, script=ids_of_bytes(tokenizer, b"ab ab ab"))
    params = SamplingParams(temperature=0, max_tokens=8, stop="ab", min_tokens=3)
    assert llm.generate("the", params, **QUIET)[0].outputs[0].text == "ab "


def test_an_output_cut_inside_a_character_ends_with_a_replacement(tokenizer: Tokenizer) -> None:
    llm = make_llm(tokenizer, script=ids_of_bytes(tokenizer, "ab😀".encode()))
    assert llm.generate("the", SamplingParams(temperature=0, max_tokens=4), **QUIET)[0].outputs[0].text == "ab\ufffd"


# ---------------------------------------------------------------------- what is refused


def test_five_prompts_too_long_for_the_pool_are_refused_and_the_sixth_is_answered(tokenizer: Tokenizer) -> None:
    """Case 1."""
    llm = make_llm(tokenizer, num_blocks=50, block_size=16, model_max_len=8192)
    assert llm.config.max_model_len == 49 * 16
    prompts = [[7] * 1002] * 5 + [[7] * 20]
    outputs = llm.generate(prompts, GREEDY, on_invalid="return", **QUIET)
    for output in outputs[:5]:
        assert (output.outputs[0].finish_reason, output.finished) == ("error", True)
        assert output.error is not None
        assert re.search(r"1002 tokens.*max_model_len=784.*49 blocks of 16", output.error)
    assert outputs[5].error is None and len(outputs[5].outputs[0].token_ids) == 8
    assert_idle(llm)


def test_all_refused_prompts_are_named_before_anything_runs(tokenizer: Tokenizer) -> None:
    steps: list[Any] = []
    llm = make_llm(tokenizer, fault=steps.append)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"(?s)2 of 4 prompts are refused.*prompt 1: .*empty.*prompt 3: Token id -1") as caught:
        llm.generate(["good", "", "good", [5, -1]], GREEDY, **QUIET)
    assert "prompt 0" not in str(caught.value) and "prompt 2" not in str(caught.value)
    assert not steps
    assert_idle(llm)


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], {"prompt": ""}, {"prompt_token_ids": []}])
def test_an_empty_prompt_is_refused_and_the_engine_lives(llm: LLM, prompt: Any) -> None:
    """Case 14."""
    with pytest.raises(ValueError, match=r"empty"):
        llm.generate(prompt, GREEDY, **QUIET)
    assert llm.generate("the fox", GREEDY, **QUIET)[0].outputs[0].finish_reason == "length"


def test_the_limit_of_a_prompt_is_one_less_than_max_model_len(tokenizer: Tokenizer) -> None:
    """Case 15."""
    llm = make_llm(tokenizer, max_model_len=20)
    params = SamplingParams(temperature=0, max_tokens=100)
    longest = llm.generate([7] * 19, params, **QUIET)[0].outputs[0]
    assert (len(longest.token_ids), longest.finish_reason) == (1, "length")
    for length in (20, 21):
        with pytest.raises(ValueError, match=rf"The prompt has {length} tokens; with max_model_len=20 it may have at most 19"):
            llm.generate([7] * length, params, **QUIET)
    assert_idle(llm)


def test_token_ids_outside_the_vocabulary_are_refused_for_that_request_only(llm: LLM, tokenizer: Tokenizer) -> None:
    """Case 16."""
    prompts = [[5, -1], [5, 6], [5, tokenizer.vocab_size]]
    negative, good, large = llm.generate(prompts, GREEDY, on_invalid="return", **QUIET)
    last = tokenizer.vocab_size - 1
    assert negative.error == f"Token id -1 in the prompt is not in the vocabulary: ids go from 0 to {last}."
    assert large.error == f"Token id {last + 1} in the prompt is not in the vocabulary: ids go from 0 to {last}."
    assert good.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (5, "prompts must be"),
        ([5, "text"], r"must be a text, token ids .* got 5"),
        ([["a"]], "token ids must be integers, got 'a'"),
        ([5.0], "token ids .* got 5.0"),
        ([[True]], "token ids must be integers, got True"),
        ({}, '"prompt" .* or "prompt_token_ids"'),
        ({"prompt": 5}, '"prompt" .* or "prompt_token_ids"'),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, r"multi_modal_data.* is not supported"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
        ("\ud800", "surrogates"),
    ],
)
def test_a_malformed_prompt_is_refused_by_what_is_wrong(llm: LLM, prompt: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        llm.generate(prompt, GREEDY, **QUIET)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("n", 0),
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", -2),
        ("min_tokens", 17),
        ("stop", [""]),
        ("logit_bias", {-5: 1.0}),
    ],
)
def test_wrong_sampling_params_are_refused_with_the_field(field: str, value: Any) -> None:
    """Case 17."""
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_stop_token_ids_outside_the_vocabulary_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="stop_token_ids"):
        llm.generate("the", SamplingParams(stop_token_ids=[10**6]), **QUIET)


def test_lists_of_another_length_than_the_prompts_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"sampling_params has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY], **QUIET)
    with pytest.raises(ValueError, match=r"priority has 3 entries for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, priority=[1, 2, 3], **QUIET)


def test_what_is_no_sampling_params_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"must be a SamplingParams, got \{'temperature': 0\}"):
        llm.generate("the", {"temperature": 0}, **QUIET)  # type: ignore[arg-type]


def test_priority_needs_the_priority_policy(llm: LLM, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r'priority=1 needs LLM\(scheduling_policy="priority"\)'):
        llm.generate("the", GREEDY, priority=[1], **QUIET)
    assert make_llm(tokenizer, scheduling_policy="priority").generate("the", GREEDY, priority=[1], **QUIET)


@pytest.mark.parametrize("priority", ["12", [None, 1], [0.5, 1]])
def test_a_priority_that_is_no_integer_is_refused(tokenizer: Tokenizer, priority: Any) -> None:
    llm = make_llm(tokenizer, scheduling_policy="priority")
    with pytest.raises(ValueError, match="priority must be an integer"):
        llm.generate(["a", "b"], GREEDY, priority=priority, **QUIET)
    assert_idle(llm)


@pytest.mark.parametrize("prompt", [b"hello", bytearray(b"hello"), [b"hello"], {"prompt_token_ids": b"hello"}])
def test_bytes_are_not_taken_for_token_ids(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ValueError, match="A prompt must be a text, token ids"):
        llm.generate(prompt, GREEDY, **QUIET)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 0), ("temperature", -1.0), ("n", 3), ("top_p", 0.0), ("stop", [""]), ("seed", 2**70), ("min_tokens", 99)],
)
def test_params_made_wrong_after_they_were_checked_are_refused(llm: LLM, field: str, value: Any) -> None:
    params = SamplingParams(max_tokens=8, temperature=0)
    setattr(params, field, value)
    with pytest.raises(ValueError, match=rf"SamplingParams\.{field}"):
        llm.generate("the fox", params, **QUIET)
    assert_idle(llm)


def test_params_changed_after_they_were_checked_mean_what_they_would_have_meant(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8)
    params.temperature, params.stop = 1e-7, "xyz"  # type: ignore[assignment]
    taken = llm.llm_engine.input_processor.process("1", "the fox", params).core.sampling_params
    assert (taken.temperature, taken.stop) == (0.0, ["xyz"])


def test_on_invalid_takes_two_words(llm: LLM) -> None:
    with pytest.raises(ValueError, match="on_invalid"):
        llm.generate("the", GREEDY, on_invalid="ignore", **QUIET)


# ---------------------------------------------------------------------- components and defaults


def test_a_replaced_detokenizer_writes_the_text(tokenizer: Tokenizer) -> None:
    class Shouting(IncrementalDetokenizer):
        def push(self, token_id: int) -> str:
            return super().push(token_id).upper()

    llm = make_llm(tokenizer, script=tokenizer.encode("the fox"), components=Components({"detokenizer": Shouting}))
    params = SamplingParams(temperature=0, max_tokens=len(tokenizer.encode("the fox")))
    assert llm.generate("the", params, **QUIET)[0].outputs[0].text == "THE FOX"


class GreedySampler:
    capabilities = frozenset({"temperature"})


def test_what_a_replaced_sampler_cannot_do_is_refused_by_name(tokenizer: Tokenizer) -> None:
    llm = make_llm(tokenizer, components=Components({"sampler": GreedySampler}))
    with pytest.raises(
        ValueError, match=r"SamplingParams\.top_k=5 needs 'top_k', which your sampler component .*GreedySampler"
    ):
        llm.generate("the", SamplingParams(top_k=5), **QUIET)
    assert llm.generate("the", GREEDY, **QUIET)


def test_defaults_come_from_generation_config(tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 20, "top_p": 0.9, "max_new_tokens": 7, "repetition_penalty": 1.1, "typical_p": 0.9,'
        ' "do_sample": true}'
    )
    llm = make_llm(tokenizer, model_path=tmp_path)
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 20, 0.9, 7)
    assert params.repetition_penalty == 1.1
    assert "typical_p=0.9" in caplog.text
    assert len(llm.generate("the", **QUIET)[0].outputs[0].token_ids) == 7
    params.max_tokens = 1  # a copy
    assert llm.get_default_sampling_params().max_tokens == 7


def test_generation_config_vllm_ignores_the_model_s(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    llm = make_llm(tokenizer, model_path=tmp_path, generation_config="vllm")
    assert llm.get_default_sampling_params() == SamplingParams()


def test_defaults_a_replaced_sampler_cannot_do_are_left_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    llm = make_llm(tokenizer, model_path=tmp_path, components=Components({"sampler": GreedySampler}))
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6)


def test_a_wrong_generation_config_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ValueError, match=r'generation_config\.json: SamplingParams\.top_p .*generation_config="vllm"'):
        make_llm(tokenizer, model_path=tmp_path)


# ---------------------------------------------------------------------- the bar


def test_the_bar_counts_requests_and_shows_speeds(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    error = capsys.readouterr().err
    assert "Processed prompts: 100%" in error and "2/2" in error and "output: " in error


def test_no_bar_when_not_wanted(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr() == ("", "")


def test_a_bar_of_one_s_own(llm: LLM) -> None:
    from tqdm import tqdm

    made: list[tqdm[Any]] = []

    def bar(*args: Any, **kwargs: Any) -> tqdm[Any]:
        made.append(tqdm(*args, **kwargs, disable=None))
        return made[-1]

    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=bar)
    assert len(made) == 1
