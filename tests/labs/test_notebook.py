"""Exercises in a real kernel: which cell is checked, what is shown, what is remembered."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., list[str]]
ROOT = Path(__file__).resolve().parents[2]

GOOD_2_1 = """from checks import check
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    tokens = list(token_ids)
    for _ in range(max_new_tokens):
        tokens.append(int(model(torch.tensor(tokens))[-1].argmax()))
    return tokens[len(token_ids) :]


check("2.1")"""

STUB_2_1 = '''from checks import check


def greedy_generate(model, token_ids, max_new_tokens):
    """Docstring."""
    raise NotImplementedError("Exercise 2.1: greedy_generate")


check("2.1")'''
GOOD_2_3 = '''from checks import check
import torch

REMOVED = float("-inf")


def helper(x):
    return x.cumsum(-1)


def apply_top_p(logits, p):
    """Mine."""
    ordered, order = logits.sort(-1, descending=True)
    probs = ordered.softmax(-1)
    removed = (helper(probs) - probs >= p[:, None]) & (p < 1)[:, None]
    return logits.masked_fill(removed.scatter(-1, order, removed), REMOVED)


check("2.3")'''


def test_green_is_one_line_and_red_is_a_message_without_a_traceback(run_cells: Run) -> None:
    green, untouched, wrong = run_cells(GOOD_2_1, STUB_2_1, GOOD_2_1.replace(".argmax()", ".argmin()"))
    assert green == "Exercise 2.1 passed (7 cases).\n"
    assert untouched.startswith("CheckFailed\nExercise 2.1. Not attempted yet") and 'hint("2.1")' in untouched
    assert wrong.startswith("CheckFailed\nExercise 2.1 is not right yet (wrong value).\n\n    greedy_generate(model, [")
    assert "argmin" in wrong and "Traceback" not in wrong and "checking.py" not in wrong


def test_the_cell_alone_is_checked_whatever_else_the_notebook_holds(run_cells: Run) -> None:
    uses_block = GOOD_2_1.replace("tokens = list(token_ids)", "tokens = list(token_ids[:LIMIT])")
    uses_torch = GOOD_2_1.replace("import torch\n", "")
    _, block, module, nowhere = run_cells(
        "import torch\nLIMIT = 1000", uses_block, uses_torch, uses_torch.replace("torch.", "numpyy.")
    )
    assert "LIMIT lives in your notebook; define it in this cell" in block
    assert "torch is imported elsewhere in your notebook; import it in this cell too" in module
    assert "numpyy is not defined" in nowhere and "sees this cell alone" in nowhere


def test_any_cell_may_run_first_twice_and_out_of_order(run_cells: Run) -> None:
    wrong = GOOD_2_1.replace("[-1]", "[0]")
    first, second, third, fourth = run_cells(GOOD_2_1, wrong, GOOD_2_1, GOOD_2_1)
    assert first == third == fourth and "is not right yet" in second


def test_other_names_and_signatures_are_named(run_cells: Run) -> None:
    other_name, other_signature, magic, inside = run_cells(
        GOOD_2_1.replace("def greedy_generate(model, token_ids, max_new_tokens)", "def generate(model)"),
        GOOD_2_1.replace("(model, token_ids, max_new_tokens)", "(model)"),
        GOOD_2_1.replace("import torch", "%timeit -n1 -r1 1\nimport torch"),
        "from checks import check\ndef f():\n    check('2.1')\nf()",
    )
    assert "Expected greedy_generate(model, token_ids, max_new_tokens), found generate(model)." in other_name
    assert "Expected greedy_generate(model, token_ids, max_new_tokens), found greedy_generate(model)." in other_signature
    assert "IPython command" in magic
    assert "at the left margin" in inside


def test_a_check_in_a_cell_of_its_own_is_told_where_it_belongs(run_cells: Run) -> None:
    code, call = GOOD_2_1.rsplit("\n\n\n", 1)
    _, alone = run_cells(code, f"from checks import check\n{call}")
    assert "greedy_generate is in another cell of your notebook. A check sees only the cell it stands in" in alone


def test_an_exercise_may_be_named_without_quotation_marks(run_cells: Run) -> None:
    hint, checked, unknown = run_cells(
        "from checks import hint\nhint(2.1)", GOOD_2_1.replace('check("2.1")', "check(2.1)"), "hint(2.9)"
    )
    assert "Hint 1 of 3 for exercise 2.1" in hint and "Exercise 2.1 passed" in checked
    assert "There is no exercise '2.9' here. There are: 2.1, 2.2, 2.3." in unknown


def test_one_right_case_is_one_case(run_cells: Run) -> None:
    (shown,) = run_cells('from checks import check\ndef double(x):\n    return x + 2\n\ncheck("0.0")')
    assert "1 of 8 cases is right; this is the smallest that is not." in shown


def test_other_ways_to_write_the_check_work_too(run_cells: Run) -> None:
    dotted, assigned = run_cells(
        GOOD_2_1.replace("from checks import check", "import checks").replace("check(", "checks.check("),
        GOOD_2_1.replace('check("2.1")', 'result = check("2.1")'),
    )
    assert "passed" in dotted and "passed" in assigned


def test_an_endless_loop_leaves_the_kernel_alive(run_cells: Run) -> None:
    endless = GOOD_2_1.replace("tokens = list(token_ids)", "while True: pass")
    _, stopped, after, good, _ = run_cells(
        "import dataclasses, checks.exercises.lab_02 as lab, checks.sandbox.sandbox as s\n"
        "before, marker = lab.CHECKS['2.1'], 41\n"
        "lab.CHECKS['2.1'] = dataclasses.replace(before, limits=s.Limits(cpu_seconds=1))",
        endless,
        "print(marker + 1)",
        GOOD_2_1,
        "lab.CHECKS['2.1'] = before",
    )
    assert "Exercise 2.1 is not right yet (time)" in stopped and "1 seconds" in stopped
    assert after == "42\n" and "passed" in good


def test_here_runs_in_this_kernel_and_does_not_count(run_cells: Run, student: Path) -> None:
    here = GOOD_2_1.replace('check("2.1")', 'check("2.1", here=True)').replace("tokens = list", "seen.append(1); tokens = list")
    _, result, seen = run_cells("seen = []", here, "print(len(seen))")
    assert "all 7 cases are right here" in result and seen == "7\n"
    assert not (student / ".progress" / "progress.json").exists()


def test_hints_open_one_at_a_time_and_survive_a_restart(kernel: Any, student: Path) -> None:
    first, second = kernel.run("from checks import hint\nhint('2.1')", "hint('2.1')")
    assert "Hint 1 of 3" in first and "Hint 2" not in first and "Hint 2 of 3" in second
    kernel.restart()
    _, third = kernel.run(f"%env MINIVLLM_HOME={student}", "from checks import hint\nhint('2.1')")
    assert "Hint 3 of 3" in third and "That was the last one" in third


def test_skip_uses_the_reference_and_solving_it_later_counts(run_cells: Run) -> None:
    skipped, check, works, solved, overview = run_cells(
        "from checks import skip, progress\nskip('2.1')",
        STUB_2_1,
        "import torch\nprint(greedy_generate(lambda x: torch.eye(5)[x], [3], 2))",
        GOOD_2_1,
        "progress()",
    )
    assert "is the reference from here on" in skipped and "Exercise 2.1 is skipped" in check
    assert works == "[3, 3]\n"
    assert "passed" in solved and "passed" in next(line for line in overview.splitlines() if line.startswith("  2.1"))


def test_solution_prints_an_answer_that_passes(run_cells: Run) -> None:
    (text,) = run_cells("from checks import solution\nsolution('2.2')")
    (result,) = run_cells(f"from checks import check\n{text}\ncheck('2.2')")
    assert "Exercise 2.2 passed" in result


def test_reading_the_solution_after_passing_is_not_seen_as_help(run_cells: Run, student: Path) -> None:
    run_cells("from checks import solution\nsolution('2.3')", GOOD_2_1, "solution('2.1')")
    exercises = json.loads((student / ".progress" / "progress.json").read_text())["exercises"]
    assert exercises["2.3"]["solution_seen"] and "solution_seen" not in exercises["2.1"]


def test_reset_forgets_an_exercise_and_a_lab(run_cells: Run, student: Path) -> None:
    _, _, reset, lab = run_cells(GOOD_2_1, GOOD_2_3, "from checks import reset\nreset('2.3')", "reset('02')")
    assert "Forgotten: 2.3" in reset and "Forgotten: 2.1, 2.2, 2.3" in lab
    assert not (student / "my_engine" / "sampling" / "logits.py").exists()
    assert json.loads((student / ".progress" / "progress.json").read_text())["exercises"] == {}


def test_a_passed_answer_becomes_a_part_of_my_engine(run_cells: Run, student: Path) -> None:
    passed, whose = run_cells(GOOD_2_3, "from checks import whose, components\nprint(whose()); print(list(components()))")
    assert passed == "Exercise 2.3 passed (17 cases). apply_top_p now in my_engine/sampling/logits.py.\n"
    assert whose == "sampler is yours (2.3); the rest is minivllm's\n['sampler']\n"
    text = (student / "my_engine" / "sampling" / "logits.py").read_text()
    assert '"""Mine."""' in text and "def helper(x)" in text and "def apply_min_p" in text


def test_unknown_exercises_are_told_which_there_are(run_cells: Run) -> None:
    (shown,) = run_cells("from checks import check\ncheck('2.9')")
    assert "There is no exercise '2.9' here. There are: 2.1, 2.2, 2.3." in shown and "Traceback" not in shown


def test_case_13_a_cell_that_ran_out_of_memory_leaves_it_to_the_next_and_says_what_to_lower(run_cells: Run) -> None:
    """The error is kept for its traceback, and with it every variable of its functions: unless they are let go."""
    lines = (
        "def inner():",
        "    big = torch.zeros(9); tensors.append(weakref.ref(big))",
        "    raise torch.OutOfMemoryError('CUDA out of memory.')",
        "def outer():",
        "    held = torch.zeros(9); tensors.append(weakref.ref(held))",
        "    try: inner()",
        "    except torch.OutOfMemoryError as error: raise MemoryError('on top of it') from error",
        "outer()",
    )
    _, full, after = run_cells(
        "import checks.student.memory, torch, weakref\nchecks.student.memory.let_go_when_memory_is_full(); tensors = []",
        "\n".join(lines),
        "print([ref() for ref in tensors])",
    )
    assert "on top of it" in full and "gpu_memory_utilization" in full
    assert after == "[None, None]\n"


def test_two_notebooks_at_once_keep_each_others_progress(student: Path) -> None:
    code = (
        "import sys\nfrom checks.student.home import changing_progress\n"
        "for i in range(40):\n"
        "    with changing_progress() as state:\n"
        "        state['predictions'][f'{sys.argv[1]}.{i}'] = {'answer': 'x'}\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, name], cwd=ROOT) for name in "abc"]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    state = json.loads((student / ".progress" / "progress.json").read_text())
    assert len(state["predictions"]) == 120 and len(state["student"]) == 32


def test_a_damaged_progress_file_is_set_aside(student: Path, capsys) -> None:
    from checks.student.home import changing_progress, read_progress

    (student / ".progress").mkdir(parents=True)
    (student / ".progress" / "progress.json").write_text('{"exercises": [')
    assert read_progress()["exercises"] == {}
    assert "set aside" in capsys.readouterr().out and (student / ".progress" / "progress.unreadable.json").exists()
    with changing_progress() as state:
        state["use"]["sampler"] = "reference"
    assert read_progress()["use"] == {"sampler": "reference"}


def test_a_solution_notebook_does_not_touch_the_students_folder(monkeypatch) -> None:
    from checks.student.home import home

    monkeypatch.delenv("MINIVLLM_HOME", raising=False)
    monkeypatch.chdir(ROOT / "solutions")
    assert home() == ROOT / "solutions" / ".home"
    monkeypatch.chdir(ROOT / "labs")
    assert home() == ROOT / "labs"
