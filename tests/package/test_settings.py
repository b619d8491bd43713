"""EngineConfig, SamplingParams and Components refuse what is wrong, by name, with the limit and the fix."""

from __future__ import annotations

import pytest

from minivllm import Components, EngineConfig, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("max_tokens", 0),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("stop", [""]),
        ("stop", ""),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "2"),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("logprobs", -1),
        ("seed", 2**64),
        ("max_tokens", True),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-308),
        ("repetition_penalty", 1e300),
        ("top_k", 10**30),
        ("max_tokens", 2**63),
        ("truncate_prompt_tokens", 10**30),
        ("logit_bias", [5]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {5: float("nan")}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("bad_words", [" "]),
        ("bad_words", "x"),
        ("prompt_logprobs", 21),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("skip_special_tokens", 1),
        ("include_stop_str_in_output", None),
    ],
)
def test_case_17_a_bad_sampling_value_is_refused_naming_the_field_and_the_value(field: str, value: object):
    with pytest.raises(ValueError, match=f"SamplingParams.{field} "):
        SamplingParams(**{field: value})


def test_case_17_min_tokens_above_max_tokens_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"min_tokens must be at most max_tokens=4, got 5"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("detokenize", False),
        ("flat_logprobs", True),
        ("structured_outputs", {"json": {}}),
        ("logits_processors", [print]),
        ("thinking_token_budget", 5),
    ],
)
def test_a_vllm_field_that_is_not_served_is_refused_by_name(field: str, value: object):
    with pytest.raises(ValueError, match=f"{field}.*not supported"):
        SamplingParams(**{field: value})


def test_a_vllm_field_that_asks_for_nothing_is_accepted():
    SamplingParams(presence_penalty=0, repetition_penalty=1.0, logit_bias=None, bad_words=[], detokenize=True)


def test_greedy_completions_are_one():
    with pytest.raises(ValueError, match=r"SamplingParams\.n must be 1 with temperature=0"):
        SamplingParams(n=2, temperature=0)


def test_a_bias_is_cut_to_a_hundred_and_may_be_keyed_by_text_as_json_is():
    assert SamplingParams(logit_bias={"5": 1000, 6: -1000}).logit_bias == {5: 100.0, 6: -100.0}


def test_a_misspelled_field_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="Did you mean 'max_tokens'"):
        SamplingParams(max_token=5)


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="\n").stop == ["\n"]


def test_a_temperature_below_1e_5_is_greedy_and_turns_the_filters_off():
    params = SamplingParams(temperature=1e-6, top_k=5, top_p=0.5, min_p=0.1)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 0, 1.0, 0.0)


def test_a_small_temperature_is_raised_to_a_hundredth():
    assert SamplingParams(temperature=1e-4).temperature == 0.01


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, ("64", "32")),
        ({"long_prefill_token_threshold": 100, "max_num_batched_tokens": 64}, ("100", "64")),
        ({"enable_chunked_prefill": False, "max_model_len": 512, "max_num_batched_tokens": 256}, ("512", "256")),
    ],
)
def test_case_10_settings_that_contradict_each_other_are_refused_with_the_two_numbers(settings: dict, words: tuple):
    with pytest.raises(ValueError) as refused:
        EngineConfig(**settings).resolved("cpu").fit_max_model_len(2048, 1000)
    assert all(w in str(refused.value) for w in words)


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 0},
        {"dtype": "int8"},
        {"gpu_memory_utilization": 1.5},
        {"num_gpu_blocks_override": 1},
        {"max_model_len": 1},
        {"scheduling_policy": "lifo"},
        {"max_num_seqs": 2.0},
    ],
)
def test_a_bad_setting_is_refused_naming_it_and_its_value(settings: dict):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=name) as refused:
        EngineConfig(**settings)
    assert str(value) in str(refused.value)


def test_a_vllm_setting_that_is_not_served_is_refused_unless_it_asks_for_nothing():
    EngineConfig.from_kwargs(tensor_parallel_size=1, enforce_eager=True)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 is not supported"):
        EngineConfig.from_kwargs(tensor_parallel_size=2)


def test_an_unknown_setting_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="Did you mean 'max_model_len'"):
        EngineConfig.from_kwargs(max_model_length=5)


def test_max_model_len_fits_itself_to_the_pool_without_the_null_block():
    config = EngineConfig(block_size=16).resolved("cpu")
    assert config.fit_max_model_len(8192, num_blocks=50).max_model_len == 49 * 16
    assert config.fit_max_model_len(512, num_blocks=50).max_model_len == 512


def test_an_explicit_max_model_len_that_one_sequence_cannot_reach_is_refused_at_start():
    config = EngineConfig(block_size=16, max_model_len=785).resolved("cpu")
    with pytest.raises(ValueError, match=r"max_model_len=785 .* 784"):
        config.fit_max_model_len(8192, num_blocks=50)


def test_components_refuse_a_name_that_is_no_seam_and_a_part_that_cannot_be_called():
    with pytest.raises(ValueError, match="Components are: block_hash"):
        Components({"blockpool": dict})
    with pytest.raises(ValueError, match="must be a function or a class"):
        Components({"block_hash": 3})


def test_a_capability_a_part_lacks_is_off_unless_someone_asked_for_it(caplog: pytest.LogCaptureFixture):
    class Pool:
        capabilities = frozenset({"allocate"})

    parts = Components({"block_pool": Pool})
    with caplog.at_level("INFO", logger="minivllm"):
        assert not parts.require("block_pool", "caching", asked_for=None)
    assert "caching is off" in caplog.text
    with pytest.raises(ValueError, match="enable_prefix_caching=True needs 'caching'"):
        parts.require("block_pool", "caching", asked_for="enable_prefix_caching=True")


def test_components_from_a_folder_that_is_missing_or_broken_name_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Components.from_dir(tmp_path / "nowhere")
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "block_hash.py").write_text("def hash_block(:\n")
    with pytest.raises(ValueError, match=r"block_hash\.py fails to load: SyntaxError"):
        Components.from_dir(tmp_path)


def test_components_from_a_folder_are_the_attributes_its_files_define(tmp_path):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "block_hash.py").write_text("def hash_block(parent, tokens, extra=()):\n    return 7\n")
    parts = Components.from_dir(tmp_path)
    assert list(parts) == ["block_hash"]
    assert parts["block_hash"](None, [1]) == 7


@pytest.mark.parametrize(("device", "tokens", "requests"), [("cpu", 512, 64), ("cuda", 8192, 256)])
def test_the_size_of_a_step_follows_the_device_unless_it_is_said(device: str, tokens: int, requests: int) -> None:
    config = EngineConfig().resolved(device)
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (tokens, requests)
    assert EngineConfig(max_num_batched_tokens=96).resolved(device).max_num_batched_tokens == 96
