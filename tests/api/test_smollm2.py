"""The whole way on the real model: text in, text out, through paged KV and continuous batching."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minivllm import LLM, SamplingParams
from tests.api.harness import assert_idle

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = ["The capital of France is", "Once upon a time", "1, 2, 3, 4,"]


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(str(smollm2), dtype="float32", num_gpu_blocks_override=30) as made:
        yield made


def test_it_knows_the_capital_of_france(llm: LLM) -> None:
    output = llm.generate("The capital of France is", GREEDY, use_tqdm=False)[0]
    assert output.outputs[0].text.startswith(" Paris")
    assert output.outputs[0].text == llm.get_tokenizer().decode(output.outputs[0].token_ids)


def test_a_batch_gives_what_each_prompt_gives_alone(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, together, strict=True):
        assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].text == output.outputs[0].text


def test_streams_read_in_turns_give_what_generate_gives(llm: LLM) -> None:
    whole = [output.outputs[0].text for output in llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)]
    texts = ["", ""]
    for deltas in zip(*(llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2]), strict=True):
        texts = [text + delta.outputs[0].text for text, delta in zip(texts, deltas, strict=True)]
    assert texts == whole
    assert_idle(llm)


def test_chat_answers_and_ends_by_itself(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
    output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)[0]
    assert "Paris" in output.outputs[0].text and "<|im_end|>" not in output.outputs[0].text
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    assert output.outputs[0].token_ids[-1] == llm.get_tokenizer().eos_token_id
    assert output.prompt is not None and output.prompt_token_ids.count(llm.get_tokenizer().bos_token_id) == 3  # one a turn


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)[0].outputs[0].text
    stop = whole[9:15]
    params = SamplingParams(temperature=0, max_tokens=8, stop=stop)
    for text in (
        llm.generate(PROMPTS[1], params, use_tqdm=False)[0].outputs[0].text,
        "".join(delta.outputs[0].text for delta in llm.stream(PROMPTS[1], params)),
    ):
        assert text == whole[: whole.index(stop)]


def test_a_seed_gives_the_same_text_beside_other_requests(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, seed=42, max_tokens=8)
    alone = llm.generate(PROMPTS[1], seeded, use_tqdm=False)[0].outputs[0].token_ids
    others = SamplingParams(temperature=1.0, max_tokens=8)
    beside = llm.generate([*PROMPTS, PROMPTS[1]], [others] * 3 + [seeded], use_tqdm=False)
    assert beside[3].outputs[0].token_ids == alone
    assert beside[1].outputs[0].token_ids != alone


def test_logprobs_of_greedy_tokens_have_rank_one(llm: LLM) -> None:
    completion = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=4, logprobs=3), use_tqdm=False)[0].outputs[0]
    assert completion.logprobs is not None
    for token_id, row in zip(completion.token_ids, completion.logprobs, strict=True):
        assert row[token_id].rank == 1 and len(row) == 3
        assert all(entry.logprob <= row[token_id].logprob <= 0 for entry in row.values())


def test_a_repeated_prompt_is_found_in_the_prefix_cache(llm: LLM) -> None:
    prompt = "A list of all the colours of the rainbow, in their order, from the outside to the inside, is this: " * 2
    llm.reset_prefix_cache()
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert first.num_cached_tokens == 0 < second.num_cached_tokens < len(second.prompt_token_ids)
    assert second.outputs[0].text == first.outputs[0].text


def test_the_length_limits_hold_on_the_real_engine(llm: LLM) -> None:
    limit = llm.config.max_model_len
    assert limit == 29 * 16
    with pytest.raises(ValueError, match=f"The prompt has {limit} tokens"):
        llm.generate([7] * limit, GREEDY, use_tqdm=False)
    output = llm.generate([7] * (limit - 1), GREEDY, use_tqdm=False)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (1, "length")


def test_random_weights_without_a_tokenizer_run_on_token_ids(smollm2: Path, tmp_path: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": 1, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with LLM(tmp_path, load_format="dummy", dtype="float32", num_gpu_blocks_override=10) as llm:
        output = llm.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)[0]
        assert len(output.outputs[0].token_ids) == 3 and output.outputs[0].text == ""
        with pytest.raises(ValueError, match="no tokenizer"):
            llm.generate("text", use_tqdm=False)
        with pytest.raises(ValueError, match="needs a tokenizer"):
            llm.generate([5], SamplingParams(stop="a"), use_tqdm=False)


@pytest.mark.parametrize("command", ["generate --chat", "chat"])
def test_the_command_answers_on_the_real_model(smollm2: Path, command: str) -> None:
    argv = [sys.executable, "-m", "minivllm", *command.split(), "--model", str(smollm2), "--temperature", "0"]
    argv += ["--max-tokens", "8", "--num-gpu-blocks-override", "30", "--dtype", "float32"]
    question = "What is the capital of France?"
    done = subprocess.run(argv, input=question + "\n", capture_output=True, text=True, check=True)
    assert "Paris" in done.stdout
    assert "max_model_len 464" in done.stderr and "Traceback" not in done.stderr
    assert ("tok/s" in done.stderr) == (command == "chat")
