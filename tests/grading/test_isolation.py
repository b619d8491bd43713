"""What is between a student's code and the machine, and what is left where the system gives no namespaces."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checks.authoring.source import Missing, answer_source
from checks.exercises import Row, check_of, find, has_checks, table
from checks.exercises.evaluate import Grading, Report, evaluate
from checks.grading import isolation
from checks.grading.copying import remark, takes_the_answer
from checks.grading.isolation import forbidden, has_namespaces, jail_for, tree_path
from checks.grading.points import Grader
from checks.grading.records import Submission
from checks.grading.run import run
from checks.grading.trees import Trees, blanked
from checks.sandbox.sandbox import close_server
from tests.grading import mangled
from tests.grading.conftest import SECRET, SHORT, options

ROOT = Path(__file__).resolve().parents[2]
# What a child finds in /tmp, in its own words; without the way to this Python, where a clone lies in /tmp.
SEEN_IN_TMP = f"[name for name in os.listdir('/tmp') if not {sys.prefix!r}.startswith('/tmp/' + name + '/')]"
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="namespaces and system call filters are Linux's")


def built() -> list[Row]:
    found = []
    for row in table().values():
        try:
            if has_checks(row.lab) and answer_source(row):
                found.append(row)
        except (Missing, ValueError):  # a lab that is not finished
            continue
    return found


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trees]:
    made = Trees(tmp_path_factory.mktemp("trees") / "trees")
    made.build(built())
    yield made
    close_server()


def look(trees: Trees, body: str) -> Report:
    """What an answer to 4.3 with this body leads to, in the jail. `say(...)` in it is what the report's message has."""
    source = mangled.function(body, "def say(what): raise ValueError(repr(what))")
    grading = Grading(jail_for(trees), tree_path(trees, "4.3"), forbidden())
    return evaluate(find("4.3"), source, limits=SHORT, grading=grading)


@pytest.mark.parametrize("exercise", [row.id for row in built()])
def test_the_reference_passes_on_an_engine_without_its_answer(trees: Trees, exercise: str) -> None:
    row = find(exercise)
    result, incidents = Grader(trees, SECRET).exercise(row, answer_source(row), 2.0)
    if [i.kind for i in incidents] == ["cannot_check"]:
        pytest.skip(incidents[0].detail)
    assert (result.status, result.points, incidents) == ("passed", 2.0, []), result.message or result.hidden
    assert result.flags == (remark(row),)


def test_in_the_jail_too_a_kernel_is_read_by_the_compiler(trees: Trees) -> None:
    if check_of(find("8.3")).why_not() or check_of(find("8.3")).second is None:
        pytest.skip("kernels are not compiled for a GPU that is not here")
    text = (mangled.MISTAKES / "ex_8_3" / "a_plain_helper.py").read_text(encoding="utf-8")
    result, _ = Grader(trees, SECRET).exercise(find("8.3"), text, 1.0)
    assert result.status == "failed" and "is a plain Python function" in result.message


@pytest.mark.slow
def test_no_right_answer_counts_as_copied(trees: Trees) -> None:
    for row in built():
        for path in sorted((mangled.MISTAKES / f"ex_{row.id.replace('.', '_')}").glob("*.py")):
            text = path.read_text(encoding="utf-8")
            if not text.startswith("# expect: passed"):
                continue
            result, _ = Grader(trees, SECRET).exercise(row, text, 1.0)
            assert result.status in ("passed", "error"), f"{path}: {result}"


def test_an_answer_that_is_taken_out_keeps_its_signature_and_docstring() -> None:
    text = blanked(
        'class A:\n    def f(self, x):\n        """Doc."""\n        y = x\n        return y\n\n    g = 1\n', {"A.f"}, "9.9"
    )
    assert "def f(self, x):" in text and '"""Doc."""' in text and "g = 1" in text
    assert "y = x" not in text and "A.f (exercise 9.9)" in text


@pytest.mark.parametrize(
    ("source", "taken"),
    [
        ("from minivllm.worker.input_batch import slot_mapping", True),
        ("from minivllm.worker import input_batch as ib\nf = ib.slot_mapping", True),
        ("import minivllm.worker.input_batch\nf = minivllm.worker.input_batch.slot_mapping", True),
        ("def f():\n    from minivllm.worker.input_batch import slot_mapping as g", True),
        ("from minivllm.worker.input_batch import InputBatch", False),
        ("def slot_mapping(a): return a\nslot_mapping.x = 1", False),
    ],
)
def test_taking_the_answer_is_seen_in_the_text(trees: Trees, source: str, taken: bool) -> None:
    assert bool(takes_the_answer(source, trees.withheld(find("4.3")))) == taken


def test_no_judge_and_no_solution_is_in_what_a_child_sees(trees: Trees) -> None:
    files = {path.relative_to(trees.folder).as_posix() for path in trees.folder.rglob("*.py")}
    checks = {name for name in files if name.startswith("machine/checks/exercises/")}
    assert all(name.endswith(("_run.py", "__init__.py")) for name in checks)
    assert not [name for name in files if "solution" in name or "quiz" in name or "grading" in name.partition("/")[2]]


@linux
def test_a_child_sees_no_clone_no_home_and_no_other_process(trees: Trees) -> None:
    if not has_namespaces():
        pytest.skip("this system allows no namespaces")
    body = (
        f"import os\nsay((os.path.exists({str(ROOT / 'solutions')!r}), os.path.exists({str(ROOT / 'checks')!r}),"
        f" os.listdir(os.path.expanduser('~')), {SEEN_IN_TMP},"
        " len([p for p in os.listdir('/proc') if p.isdigit()])))"
    )
    assert "(False, False, [], [], 2)" in look(trees, body).verdict.message  # the server of children, and itself


@linux
def test_what_one_child_leaves_behind_is_gone_before_the_next(trees: Trees) -> None:
    if not has_namespaces():
        pytest.skip("this system allows no namespaces")
    body = f"import os\nseen = {SEEN_IN_TMP}\nopen('/tmp/note', 'w').write('x')\nos.makedirs('/tmp/a/b')\nsay(seen)"
    for _ in range(2):
        assert "ValueError: []" in look(trees, body).verdict.message


@linux
@pytest.mark.parametrize(
    "body",
    [
        "import os\nos.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import socket\nsocket.socket()",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nos.execv('/bin/true', ['true'])",
    ],
)
def test_the_filter_refuses(trees: Trees, body: str) -> None:
    assert "PermissionError" in look(trees, body).verdict.message


@linux
def test_a_thread_is_no_process(trees: Trees) -> None:
    assert (
        "[7]"
        in look(
            trees, "import threading\nx = []\nt = threading.Thread(target=x.append, args=(7,))\nt.start(); t.join(); say(x)"
        ).verdict.message
    )


SPEAKS = """
import json, os, stat, struct, time
CHANNELS = []
for fd in range(3, 60):
    try:
        if stat.S_ISSOCK(os.fstat(fd).st_mode): CHANNELS.append(fd)
    except OSError: pass

def send(message):
    data = json.dumps({"$dict": [[k, v] for k, v in message.items()]}).encode()
    for fd in CHANNELS: os.write(fd, struct.pack(">I", len(data)) + data)
"""


@pytest.mark.parametrize(
    ("body", "category"),
    [
        ("while True:\n    send({'kind': 'started'})\n    time.sleep(0.1)", "time"),
        ("while True: send({'kind': 'result', 'case': 0, 'output': {'$dict': []}})", "wrong type"),
        ("send({'kind': 'problem', 'case': 0})\nwhile True: pass", "exit"),
        ("send({'kind': 'done'})\nwhile True: pass", "exit"),
    ],
)
def test_forged_messages_neither_lengthen_the_time_nor_fill_the_memory_nor_pass(trees: Trees, body: str, category: str) -> None:
    grading = Grading(jail_for(trees), tree_path(trees, "4.3"), forbidden())
    report = evaluate(find("4.3"), mangled.function(body, SPEAKS), limits=SHORT, grading=grading)
    assert report.verdict.category == category and report.right == 0


@pytest.fixture
def no_namespaces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MINIVLLM_GRADING_NAMESPACES", "0")
    isolation.has_namespaces.cache_clear()
    close_server()
    yield
    isolation.has_namespaces.cache_clear()
    close_server()


@linux
@pytest.mark.usefixtures("no_namespaces", "short_limits")
def test_without_namespaces_the_points_are_the_same_and_the_results_say_so(tmp_path: Path) -> None:
    students = {"one_right": "passed", "importlib": "copied", "reads_the_clone": "copied", "reads_the_source": "copied"}
    students |= {"fork_bomb": "failed", "kills_its_parent": "failed", "network": "failed", "runs_cat": "failed"}
    for student in students:
        (tmp_path / "in" / student).mkdir(parents=True)
        raw: dict[str, Any] = mangled.CELLS[student][0]()
        (tmp_path / "in" / student / "x.ipynb").write_text(json.dumps(raw), encoding="utf-8")
    run(options(tmp_path / "in", tmp_path / "out"), say=lambda _: None)
    for path in (tmp_path / "out" / ".state").glob("*-04-*.json"):
        record = Submission.from_json(path.read_text(encoding="utf-8"))
        assert record.isolation == "not isolated"
        assert next(r.status for r in record.exercises if r.exercise == "4.3") == students[record.student], record.student
    assert os.getpid()  # and this process was not killed


def test_a_childs_torch_sees_no_gpu(tmp_path: Path) -> None:
    """Points are the same whatever card the grader has."""
    assert jail_for(Trees(tmp_path)).environ()["CUDA_VISIBLE_DEVICES"] == ""
