"""SamplingParams' features through the offline API: over a tiny random model, and over one that says what it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from minivllm import LLM, SamplingParams
from minivllm.text.tokenizer import Tokenizer
from tests.api.harness import assert_idle, make_llm

PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("tiny")
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "max_position_embeddings": 128,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"dtype": "float32", "device": "cpu", "attention_backend": "reference", "block_size": 4}
    limits = {"num_gpu_blocks_override": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    with LLM(folder, load_format="dummy", **settings, **limits) as llm:
        yield llm


def tokens(llm: LLM, prompt: list[int] = PROMPT, **params: object) -> list[int]:
    settings = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, **params}
    return llm.generate([prompt], SamplingParams(**settings), use_tqdm=False)[0].outputs[0].token_ids  # type: ignore[arg-type]


# ---------------------------------------------------------------- n


def test_n_completions_are_those_of_n_requests_with_the_next_seeds(tiny: LLM) -> None:
    together = tiny.generate([PROMPT], SamplingParams(n=3, seed=7, max_tokens=10, ignore_eos=True), use_tqdm=False)[0]
    alone = [tokens(tiny, temperature=1.0, seed=7 + i, max_tokens=10) for i in range(3)]
    assert [output.index for output in together.outputs] == [0, 1, 2]
    assert [output.token_ids for output in together.outputs] == alone
    assert together.finished
    assert_idle(tiny)


def test_n_completions_stream_each_under_its_index(tiny: LLM) -> None:
    params = SamplingParams(n=2, seed=3, max_tokens=6, ignore_eos=True)
    whole = tiny.generate([PROMPT], params, use_tqdm=False)[0]
    joined: dict[int, list[int]] = {0: [], 1: []}
    deltas = list(tiny.stream(PROMPT, params))
    for delta in deltas:
        for output in delta.outputs:
            joined[output.index] += output.token_ids
    assert joined == {output.index: output.token_ids for output in whole.outputs}
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_closing_a_stream_of_n_completions_frees_them_all(tiny: LLM) -> None:
    with tiny.stream(PROMPT, SamplingParams(n=3, max_tokens=50, ignore_eos=True)) as stream:
        next(stream)
    assert_idle(tiny)


# ---------------------------------------------------------------- what may come


def test_only_allowed_tokens_come(tiny: LLM) -> None:
    assert set(tokens(tiny, allowed_token_ids=[3, 50, 77], temperature=1.0, seed=1)) <= {3, 50, 77}


def test_a_bias_of_a_hundred_decides(tiny: LLM) -> None:
    assert tokens(tiny, logit_bias={42: 100}) == [42] * 12


def test_case_21_penalties_are_the_requests_own(tiny: LLM) -> None:
    plain = tokens(tiny)
    settings = [
        {},
        {"repetition_penalty": 1.8},
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
    ]
    alone = [tokens(tiny, **setting) for setting in settings]
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **s) for s in settings]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        outputs = tiny.generate([PROMPT] * 4, [params[i] for i in order], use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [alone[i] for i in order]
    assert alone[0] == plain


def test_a_bad_word_does_not_come(tokenizer: Tokenizer, tiny: LLM) -> None:
    params = make_llm(tokenizer).llm_engine.input_processor.process("1", "the", SamplingParams(bad_words=["fox"])).core
    spelled = params.sampling_params.bad_words_token_ids
    assert tokenizer.encode("fox") in spelled
    assert all(tokenizer.decode(ids).strip() == "fox" for ids in spelled)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_case_16_a_token_id_beyond_the_vocabulary_is_refused_for_that_request_only(tiny: LLM, name: str) -> None:
    bad = SamplingParams(**{name: {106: 1.0} if name == "logit_bias" else [106]})  # type: ignore[arg-type]
    good = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = tiny.generate([PROMPT, PROMPT], [bad, good], use_tqdm=False, on_invalid="return")
    assert f"SamplingParams.{name}=106 is not in the vocabulary: ids go from 0 to 100" in str(outputs[0].error)
    assert outputs[1].outputs[0].token_ids == tokens(tiny)


# ---------------------------------------------------------------- prompt_logprobs


def test_prompt_logprobs_are_what_logprobs_say_when_the_model_makes_the_same_tokens(tiny: LLM) -> None:
    """Of a prompt of several chunks."""
    made = tiny.generate([PROMPT], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2), use_tqdm=False)[0]
    sequence = PROMPT + made.outputs[0].token_ids
    read = tiny.generate([sequence], SamplingParams(max_tokens=1, prompt_logprobs=2), use_tqdm=False)[0].prompt_logprobs
    assert read is not None and made.outputs[0].logprobs is not None
    assert len(read) == len(sequence) and read[0] is None
    for row, expected in zip(read[len(PROMPT) :], made.outputs[0].logprobs, strict=True):
        assert row is not None
        assert {t: (p.rank, pytest.approx(p.logprob, abs=1e-4)) for t, p in expected.items()} == {
            t: (p.rank, p.logprob) for t, p in row.items()
        }


def test_prompt_logprobs_come_with_the_first_delta_and_once(tiny: LLM) -> None:
    deltas = list(tiny.stream(PROMPT, SamplingParams(max_tokens=3, prompt_logprobs=0, ignore_eos=True)))
    assert [delta.prompt_logprobs is None for delta in deltas] == [False, True, True]
    assert [None if row is None else list(row) for row in deltas[0].prompt_logprobs or []] == [None, *([t] for t in PROMPT[1:])]


def test_a_prompt_of_one_token_has_one_entry_that_is_none(tiny: LLM) -> None:
    output = tiny.generate([[5]], SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)[0]
    assert output.prompt_logprobs == [None]


def test_prompt_logprobs_do_not_read_the_prefix_cache(tiny: LLM) -> None:
    tokens(tiny)
    output = tiny.generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)[0]
    assert output.num_cached_tokens == 0


# ---------------------------------------------------------------- text


def test_include_stop_str_in_output_ends_the_text_after_the_match(tokenizer: Tokenizer) -> None:
    llm = make_llm(tokenizer, script=tokenizer.encode("the quick brown fox and the dog"))
    params = SamplingParams(temperature=0, max_tokens=20, stop="brown", include_stop_str_in_output=True)
    assert llm.generate("the", params, use_tqdm=False)[0].outputs[0].text == "the quick brown"
    assert "".join(d.outputs[0].text for d in llm.stream("the", params)) == "the quick brown"


def test_special_tokens_are_text_where_asked_for(tokenizer: Tokenizer) -> None:
    bos = tokenizer.token_to_id("<|bos|>")
    assert bos is not None
    llm = make_llm(tokenizer, script=[bos, *tokenizer.encode("fox")])
    texts = [
        llm.generate("the", SamplingParams(temperature=0, max_tokens=2, skip_special_tokens=skip), use_tqdm=False)[0]
        .outputs[0]
        .text
        for skip in (True, False)
    ]
    assert texts[1] == "<|bos|>" + texts[0]


@pytest.mark.parametrize(("keep", "left"), [(3, [9, 10, 11]), (99, PROMPT), (-1, PROMPT)])
def test_truncation_keeps_the_end_of_the_prompt(tiny: LLM, keep: int, left: list[int]) -> None:
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=keep)
    assert tiny.generate([PROMPT], params, use_tqdm=False)[0].prompt_token_ids == left


def test_truncation_to_what_fits_leaves_room_for_max_tokens(tiny: LLM) -> None:
    params = SamplingParams(max_tokens=28, truncate_prompt_tokens=-1, ignore_eos=True)
    output = tiny.generate([[5] * 500], params, use_tqdm=False)[0]
    assert (len(output.prompt_token_ids), len(output.outputs[0].token_ids)) == (100, 28)


def test_truncation_to_more_than_fits_is_refused(tiny: LLM) -> None:
    with pytest.raises(ValueError, match=r"truncate_prompt_tokens=128 is too long: max_model_len=128"):
        tiny.generate([PROMPT], SamplingParams(truncate_prompt_tokens=128), use_tqdm=False)
