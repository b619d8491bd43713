"""Cases that users hit on engines of this kind, and students in courses of this kind: each is a test, and this is which.

The numbers are those of the project's two lists. Cases of grading (8, 11, 18 of the labs) are in tests/grading.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

ENGINE: dict[int, tuple[str, list[str]]] = {
    1: (
        "prompts too long for the pool, and one that fits",
        ["core/test_cases.py::test_case_1_", "api/test_generate.py::test_five_prompts_too_long"],
    ),
    2: ("two prompts longer than the budget, a full pool", ["core/test_cases.py::test_case_2_"]),
    3: ("priority, drafts, a tiny pool", ["core/test_cases.py::test_case_3_"]),
    4: ("preempted, then found in part in the cache", ["core/test_cases.py::test_case_4_"]),
    5: ("the same prompt of two blocks twice", ["core/test_cases.py::test_case_5_"]),
    6: ("a prompt of three budgets and one token", ["core/test_cases.py::test_case_6_"]),
    7: (
        "prefill by state, not by outputs; pickled",
        ["core/test_cases.py::test_case_7_a_resumed", "core/test_cases.py::test_case_7_an_engine_pickled"],
    ),
    8: (
        "the end of the pool in mid-generation",
        ["core/test_cases.py::test_case_8_a_sequence", "core/test_cases.py::test_case_8_many"],
    ),
    9: ("abort while a step is in flight", ["core/test_cases.py::test_case_9_"]),
    10: (
        "budgets too small for what is asked",
        ["core/test_cases.py::test_case_10_settings", "package/test_settings.py::test_case_10_"],
    ),
    11: ("a LoRA's name with other weights", ["core/test_cases.py::test_case_11_", "core/test_block_hash.py::test_case_11_"]),
    12: (
        "one id twice, and again after an abort",
        [
            "core/test_cases.py::test_case_12_the_same_id",
            "core/test_cases.py::test_case_12_abort",
            "serving/test_cases.py::test_case_12_",
        ],
    ),
    13: (
        "two streams, one unread",
        [
            "serving/test_cases.py::test_case_13_a_stream",
            "serving/test_cases.py::test_case_13_streams",
            "api/test_stream.py::test_a_consumer_that_stops",
            "serving/test_router_machine.py::RouterMachine",
        ],
    ),
    14: (
        "empty prompts",
        [
            "core/test_engine_core.py::test_case_14_and_16_",
            "serving/test_cases.py::test_case_14_",
            "api/test_generate.py::test_an_empty_prompt",
        ],
    ),
    15: (
        "prompts around max_model_len",
        [
            "core/test_cases.py::test_case_15_",
            "serving/test_cases.py::test_case_15_",
            "api/test_generate.py::test_the_limit_of_a_prompt",
        ],
    ),
    16: (
        "token ids outside the vocabulary",
        ["serving/test_cases.py::test_case_16_", "api/test_sampling_features.py::test_case_16_"],
    ),
    17: (
        "values out of range, by field",
        [
            "serving/test_cases.py::test_case_17_",
            "package/test_settings.py::test_case_17_a_bad",
            "serving/test_strange_bodies.py::test_any_completion",
        ],
    ),
    18: (
        "a seed beside others, alone, elsewhere",
        ["sampling/test_sampler.py::test_a_row_draws_the_same_alone", "api/test_smollm2.py::test_a_seed_gives"],
    ),
    19: (
        "a tiny temperature, masked rows",
        ["sampling/test_sampler.py::test_a_tiny_temperature", "sampling/test_sampler.py::test_rows_with_one_token_left"],
    ),
    20: (
        "top_k off, top_p at its edge",
        ["sampling/test_logits.py::test_top_k_is_off", "sampling/test_logits.py::test_top_p_keeps_the_token"],
    ),
    21: (
        "penalties",
        [
            "sampling/test_token_rules.py::test_case_21_repetition",
            "sampling/test_token_rules.py::test_case_21_penalties",
            "sampling/test_token_rules.py::test_case_21_each_penalty",
            "sampling/test_token_rules.py::test_repetition_penalty_equals",
            "api/test_sampling_features.py::test_case_21_",
        ],
    ),
    22: (
        "two end tokens, min_tokens, ignore_eos",
        ["core/test_cases.py::test_case_22_", "api/test_generate.py::test_a_list_of_end_tokens"],
    ),
    23: (
        "a stop string across tokens",
        ["serving/test_cases.py::test_case_23_", "api/test_stream.py::test_deltas_add_up", "text/test_stop_strings.py::"],
    ),
    24: (
        "emoji and lone bytes",
        [
            "serving/test_cases.py::test_case_24_",
            "api/test_stream.py::test_an_emoji",
            "api/test_stream.py::test_a_run_of_lone_bytes",
            "text/test_detokenizer.py::",
        ],
    ),
    25: (
        "a template that writes BOS",
        ["serving/test_cases.py::test_case_25_", "api/test_chat_api.py::test_a_template_that_adds_bos"],
    ),
    26: ("drafts change nothing", ["core/test_update.py::test_case_26_", "spec_decode/test_same_tokens.py::"]),
    27: ("a padded graph step", ["worker/test_graphs.py::test_a_padded_step"]),
}

LABS: dict[int, tuple[str, list[str]]] = {
    1: (
        "an exercise's cell run first after a restart",
        ["labs/test_notebook.py::test_any_cell_may_run_first", "labs/test_need.py::test_what_is_not_passed"],
    ),
    2: (
        "cells twice, or out of order; the model twice",
        ["labs/test_notebook.py::test_any_cell_may_run_first", "labs/test_strange_kernels.py::test_case_2_"],
    ),
    3: ("an endless loop", ["labs/test_sandbox.py::test_a_loop_without_end", "labs/test_notebook.py::test_an_endless_loop"]),
    4: ("endless output", ["labs/test_sandbox.py::test_printing_for_ever"]),
    5: ("another name or signature", ["labs/test_notebook.py::test_other_names_and_signatures"]),
    6: ("a package that is not installed", ["labs/test_sandbox.py::test_a_missing_package"]),
    7: ("warnings on stderr", ["labs/test_sandbox.py::test_a_warning_on_stderr"]),
    9: ("renamed notebooks", ["labs/test_restore.py::test_the_metadata_decides"]),
    10: (
        "old formats, no ids",
        [
            "labs/test_restore.py::test_an_exercise_is_found",
            "labs/test_update.py::test_without_ids",
            "labs/test_strange_files.py::test_a_notebook_of_any_shape",
        ],
    ),
    12: ("a stub left as it was", ["labs/test_restore.py::test_what_passes_is_in_my_engine"]),
    13: ("out of memory in a cell", ["labs/test_notebook.py::test_case_13_", "api/test_failures.py::test_a_failed_forward"]),
    14: ("no GPU, or an old one", ["worker/test_device.py::", "labs/test_strange_kernels.py::test_case_14_"]),
    15: (
        "widgets do not render",
        [
            "labs/test_shown_everywhere.py::test_no_output_needs",
            "observe/test_widgets.py::test_without_ipywidgets",
            "labs/test_quiz.py::test_buttons_have_nothing",
        ],
    ),
    16: ("Colab", ["labs/test_cloud.py::test_only_what_is_missing", "labs/test_cloud.py::test_a_restart_is_announced"]),
    17: (
        "no network",
        [
            "models/test_hub.py::test_no_network",
            "models/test_hub.py::test_a_cached_model",
            "labs/test_doctor.py::test_a_network_that",
        ],
    ),
    19: ("off by one at an edge; right until the pool wraps around", ["labs/test_mistakes.py::", "labs/test_mutants.py::"]),
    20: ("sizes", ["labs/test_strange_kernels.py::test_case_20_"]),
}


@cache
def names_in(path: str) -> list[str]:
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


@pytest.mark.parametrize(
    ("case", "tests"),
    [
        pytest.param(text, tests, id=f"{kind} {n}")
        for kind, table in (("engine", ENGINE), ("labs", LABS))
        for n, (text, tests) in table.items()
    ],
)
def test_every_case_is_a_test(case: str, tests: list[str]) -> None:
    for test in tests:
        path, _, start = test.partition("::")
        assert any(name.startswith(start or "test_") for name in names_in(path)), f"{case}: there is no {test}"


def test_no_case_is_left_out() -> None:
    assert sorted(ENGINE) == list(range(1, 28))
    assert sorted({*LABS, 8, 11, 18}) == list(range(1, 21))
