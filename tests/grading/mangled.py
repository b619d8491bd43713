"""Sixty-odd submissions of Lab 04 as a term brings them in, and what each has to get. `python -m tests.grading.mangled DIR`
writes them to look at.

Most have one exercise solved, 4.3 (1 point), and something done to it; the others are stubs.
"""

from __future__ import annotations

import copy
import io
import json
import os
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checks.exercises import find
from checks.exercises.lab_04 import CHECKS
from checks.grading.one import official
from checks.grading.worth import worth

ROOT = Path(__file__).resolve().parents[2]
MISTAKES = ROOT / "tests" / "mistakes"
Points = dict[str, float]
Notebook = dict[str, Any]

RIGHT = {
    "4.1": "ex_4_1/right_a_set_of_ids.py",
    "4.2": "ex_4_2/right_counts_slots.py",
    "4.3": "ex_4_3/right_divmod.py",
    "4.4": "ex_4_4/right_block_and_row.py",
    "4.5": "ex_4_5/right_a_loop.py",
}
WRONG = "ex_4_3/position_not_row.py"
IMPORTS = "import numpy as np\n"
GOOD_BODY = "entries, rows = np.divmod(positions, block_size)\nreturn np.take(block_table, entries) * block_size + rows"


def answer(file: str) -> str:
    return (MISTAKES / file).read_text(encoding="utf-8").partition("\n")[2]


def function(body: str, before: str = "") -> str:
    """An answer to 4.3 with this body."""
    return f"{IMPORTS}{before}\n\ndef slot_mapping(positions, block_table, block_size):\n{textwrap.indent(body, '    ')}\n"


def lab(answers: dict[str, str] | None = None, questions: dict[str, str] | None = None, check: bool = True) -> Notebook:
    """The lab with these texts in its exercises' cells, their check behind them, and these answers to its questions."""
    raw: Notebook = copy.deepcopy(official("04").raw)
    for cell in raw["cells"]:
        exercise = cell["metadata"].get("minivllm", {}).get("exercise")
        if exercise in (answers or {}):
            assert answers is not None
            tail = f'\n\nfrom checks import check\ncheck("{exercise}")' if check else ""
            cell["source"] = answers[exercise] + tail
        for question, told in (questions or {}).items():
            if cell["metadata"].get("minivllm", {}).get("questions") == [question]:
                cell["source"] = f'quiz("{question}", {told})'
    return raw


def cell_of(raw: Notebook, exercise: str) -> dict[str, Any]:
    return next(c for c in raw["cells"] if c["metadata"].get("minivllm", {}).get("exercise") == exercise)


def solved(**changes: Any) -> Notebook:
    """4.3 is right, and its cell is changed so."""
    raw = lab({"4.3": answer(RIGHT["4.3"])})
    cell_of(raw, "4.3").update(changes)
    return raw


def wrong(**changes: Any) -> Notebook:
    raw = lab({"4.3": answer(WRONG)})
    cell_of(raw, "4.3").update(changes)
    return raw


def with_body(body: str, before: str = "") -> Notebook:
    return lab({"4.3": function(body, before)})


def duplicated(first: str, second: str) -> Notebook:
    """Jupyter's copy of a cell: a new id, the same metadata."""
    raw = lab({"4.3": first})
    place = raw["cells"].index(cell_of(raw, "4.3"))
    twin = {**copy.deepcopy(raw["cells"][place]), "id": "aabbccdd"}
    twin["source"] = second if "check(" in second else second + '\n\ncheck("4.3")'
    raw["cells"].insert(place + 1, twin)
    return raw


def stub() -> str:
    return "".join(cell_of(official("04").raw, "4.3")["source"])


def reordered() -> Notebook:
    raw = lab({"4.3": answer(RIGHT["4.3"]), "4.1": answer(RIGHT["4.1"])})
    raw["cells"].reverse()
    return raw


def without_ids(null: bool) -> Notebook:
    """As an old front end writes it: format 4.2, no ids, no metadata of ours in the cells."""
    raw = solved()
    raw["nbformat_minor"] = 2
    for cell in raw["cells"]:
        cell.pop("id")
        cell["metadata"] = {}
        if null:
            cell["id"] = None
    return raw


def without_metadata() -> Notebook:
    raw = solved()
    del raw["metadata"]["minivllm"]
    return raw


def of_version(version: str) -> Notebook:
    raw = solved()
    raw["metadata"]["minivllm"]["version"] = version
    return raw


def learned_by_heart() -> str:
    """Right for the cases that everybody sees, and for no other."""
    seen = {
        repr((c["positions"], c["block_table"], c["block_size"])): [
            c["block_table"][p // c["block_size"]] * c["block_size"] + p % c["block_size"] for p in c["positions"]
        ]
        for c in CHECKS["4.3"].cases(0)
    }
    body = f"key = repr((positions.tolist(), block_table.tolist(), block_size))\nreturn np.array(SEEN.get(key, {[0] * 3}), int)"
    return function(body, f"SEEN = {seen!r}")


def forged_frames() -> str:
    """Writes "all is right" to every descriptor there is."""
    return function(
        "import json, os, struct\n"
        "for text in ({'kind': 'result', 'case': 0, 'output': True}, {'kind': 'done'}, {'kind': 'problem'}):\n"
        "    body = json.dumps({'$dict': [[k, v] for k, v in text.items()]}).encode()\n"
        "    for fd in range(3, 60):\n"
        "        try: os.write(fd, struct.pack('>I', len(body)) + body)\n"
        "        except OSError: pass\n"
        "return positions"
    )


ALWAYS_EQUAL = """
class Same:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    def __len__(self): return 3
    def __iter__(self): return iter([self, self, self])
    shape, dtype = (3,), "int64"
    def tolist(self): return self
"""
EQUAL_ARRAY = """
class Slots(np.ndarray):
    def __eq__(self, other): return np.True_
    def tolist(self): return Always()

class Always(list):
    def __eq__(self, other): return True
    def __getitem__(self, i): return self
"""
PATCHES = """
import gc, sys
import checks.sandbox.child as child
child.write_frame = lambda *_: None
child.missing_function = lambda *_: None
for module in list(sys.modules.values()):
    for name in ("judge", "evaluate", "CHECKS"):
        if hasattr(module, name): setattr(module, name, lambda *_, **__: True)
"""
WALKS = """
import gc, sys
found = [repr(o)[:200] for o in gc.get_objects() if isinstance(o, dict) and ("expected" in o or "judge" in o)]
frame = sys._getframe()
while frame:
    found.append(repr(sorted(frame.f_locals))[:200])
    frame = frame.f_back
"""

# What each gets for 4.3: (notebook, points of 4.3), everything else being 0.
CELLS: dict[str, tuple[Callable[[], Notebook], float]] = {
    "untouched": (lab, 0),
    "wrong": (wrong, 0),
    "one_right": (solved, 1),
    "right_then_stub": (lambda: duplicated(answer(RIGHT["4.3"]), stub()), 1),
    "right_then_wrong": (lambda: duplicated(answer(RIGHT["4.3"]), answer(WRONG)), 0),
    "wrong_then_right": (lambda: duplicated(answer(WRONG), answer(RIGHT["4.3"])), 1),
    "check_deleted": (lambda: lab({"4.3": answer(RIGHT["4.3"])}, check=False), 1),
    "check_deleted_and_wrong": (lambda: lab({"4.3": answer(WRONG)}, check=False), 0),
    "check_of_another": (lambda: wrong(source=answer(WRONG) + '\ncheck("4.1")'), 0),
    "cell_turned_into_text": (lambda: solved(cell_type="markdown"), 1),
    "cell_turned_raw": (lambda: wrong(cell_type="raw"), 0),
    "skip_comment": (lambda: wrong(source="# NBVAL_SKIP\n" + answer(WRONG)), 0),
    "skip_comment_and_right": (lambda: solved(source="# NBVAL_SKIP\n" + answer(RIGHT["4.3"])), 1),
    "raises_tag": (lambda: wrong(metadata={"tags": ["raises-exception"], "minivllm": {"exercise": "4.3"}}), 0),
    "skip_tag": (lambda: solved(metadata={"tags": ["nbval-skip"], "minivllm": {"exercise": "4.3"}}), 1),
    "endless_loop": (lambda: with_body("while True: pass"), 0),
    "endless_when_loaded": (lambda: with_body(GOOD_BODY, "while True: pass"), 0),
    "sleeps": (lambda: with_body("import time\ntime.sleep(1000)"), 0),
    "memory_hog": (lambda: with_body("hog = []\nwhile True: hog.append(bytearray(10_000_000))"), 0),
    "os_exit": (lambda: with_body("import os\nos._exit(0)"), 0),
    "sys_exit": (lambda: with_body("import sys\nsys.exit(0)"), 0),
    "prints_for_ever": (lambda: with_body("while True: print('x' * 1000)"), 0),
    "prints_much_and_right": (lambda: with_body("print('x' * 20_000)\n" + GOOD_BODY), 1),
    "replaces_check": (lambda: wrong(source="import checks\nchecks.check = lambda *_: None\n" + answer(WRONG)), 0),
    "defines_check": (lambda: wrong(source="def check(*_): print('passed')\n" + answer(WRONG) + '\ncheck("4.3")'), 0),
    "patches_the_machine": (lambda: with_body("return positions", PATCHES), 0),
    "always_equal": (lambda: with_body("return Same()", ALWAYS_EQUAL), 0),
    "equal_array": (lambda: with_body("return np.zeros(len(positions), int).view(Slots)", EQUAL_ARRAY), 0),
    "forged_frames": (lambda: lab({"4.3": forged_frames()}), 0),
    "forged_files": (
        lambda: with_body(
            "import os\nfor d in ('.', '/tmp', os.path.expanduser('~'), os.environ.get('OUT', '/nowhere')):\n"
            "    for n in ('gradebook.csv', 'result.json', '.state/x.json'):\n"
            "        try: open(os.path.join(d, n), 'w').write('student,total\\nme,100')\n"
            "        except OSError: pass\nreturn positions"
        ),
        0,
    ),
    "walks_the_heap": (lambda: with_body(f"{WALKS}\nraise ValueError(' '.join(found))"), 0),
    "fork_bomb": (lambda: with_body("import os\nwhile True: os.fork()"), 0),
    "forks_and_catches": (
        lambda: with_body("import os\ntry: os.fork()\nexcept OSError: pass\n" + GOOD_BODY),
        1,
    ),
    "threads": (
        lambda: with_body(
            "import threading, time\n"
            "threading.Thread(target=lambda: [time.sleep(0.001) for _ in iter(int, 1)], daemon=True).start()\n" + GOOD_BODY
        ),
        1,
    ),
    "ignores_signals": (
        lambda: with_body(
            "import signal\nfor n in range(1, 60):\n    try: signal.signal(n, signal.SIG_IGN)\n"
            "    except (OSError, ValueError): pass\nwhile True: pass"
        ),
        0,
    ),
    "kills_its_parent": (lambda: with_body("import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)\nreturn positions"), 0),
    "crashes": (lambda: with_body("import ctypes\nctypes.string_at(0)"), 0),
    "format_4_2": (lambda: without_ids(null=False), 1),
    "null_ids": (lambda: without_ids(null=True), 1),
    "imports_the_answer": (lambda: lab({"4.3": "from minivllm.worker.input_batch import slot_mapping\n"}), 0),
    "importlib": (
        lambda: with_body(
            "import importlib\nf = getattr(importlib.import_module('minivllm.worker.input_batch'), 'slot' + '_mapping')\n"
            "return f(positions, block_table, block_size)"
        ),
        0,
    ),
    "reads_the_source": (
        lambda: with_body(
            "import minivllm.worker.input_batch as m\nspace = {}\n"
            "exec(compile(open(m.__file__).read(), 'x', 'exec'), space)\n"
            "return space['slot_mapping'](positions, block_table, block_size)"
        ),
        0,
    ),
    "reads_the_clone": (
        lambda: with_body(
            f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfor n in [n for n in sys.modules if n.startswith('minivllm')]:\n"
            "    del sys.modules[n]\nfrom minivllm.worker import input_batch\n"
            "return input_batch.slot_mapping(positions, block_table, block_size)"
        ),
        0,
    ),
    "runs_cat": (lambda: with_body("import subprocess\nprint(subprocess.run(['cat', '/etc/passwd']))\nreturn positions"), 0),
    "network": (
        lambda: with_body("import socket\nsocket.create_connection(('192.0.2.1', 80), 2)\n" + GOOD_BODY),
        0,
    ),
    "syntax_error": (lambda: with_body("return positions +"), 0),
    "magic": (lambda: solved(source="%%time\n" + answer(RIGHT["4.3"])), 0),
    "another_name": (lambda: solved(source=answer(RIGHT["4.3"]).replace("slot_mapping", "slots")), 0),
    "missing_package": (lambda: with_body(GOOD_BODY, "import no_such_package"), 0),
    "null_byte": (lambda: solved(source="x = '\x00'\n" + answer(RIGHT["4.3"])), 0),
    "ten_thousand_brackets": (lambda: solved(source="x = " + "(" * 10_000 + ")" * 10_000), 0),
    "metadata_lost": (without_metadata, 1),
    "old_version": (lambda: of_version("0"), 1),
    "learned_by_heart": (lambda: lab({"4.3": learned_by_heart()}), 0.5),
    "returns_too_much": (lambda: with_body("return 'x' * (80 << 20)"), 0),
    "returns_a_deep_thing": (lambda: with_body("x = []\nfor _ in range(100_000): x = [x]\nreturn x"), 0),
    "error_without_words": (
        lambda: with_body("raise Odd()", "class Odd(Exception):\n    def __str__(self): raise SystemExit"),
        0,
    ),
    "turns_off_the_error": (lambda: with_body("import sys\nsys.excepthook = None\nraise KeyboardInterrupt"), 0),
}


def write(root: Path) -> dict[str, Points]:
    """Write all submissions below `root`; returns what each student gets, by exercise and question (what is not named: 0)."""
    expected: dict[str, Points] = {}

    def put(name: str, content: bytes) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def as_bytes(raw: Notebook) -> bytes:
        return json.dumps(raw).encode("utf-8", "surrogatepass")

    for student, (make, points) in CELLS.items():
        put(f"{student}/04_paged_kv.ipynb", as_bytes(make()))
        expected[student] = {"4.3": points}

    every = as_bytes(lab({e: answer(f) for e, f in RIGHT.items()}, {"4.q1": '"a"', "4.q2": '"zz"', "4.q3": '"b"'}))
    all_right = {e: worth("04")[e] for e in RIGHT} | {"4.q1": 0.5, "4.q3": 0.5}
    put("all_right/04_paged_kv.ipynb", every)
    expected["all_right"] = all_right
    put("lab five is not four/03_paged_kv-Copy1.ipynb", as_bytes(solved()))
    expected["lab five is not four"] = {"4.3": 1}
    put("José Ñandú/labor vier – fertig (1).ipynb", as_bytes(solved()))
    expected["José Ñandú"] = {"4.3": 1}
    put("reordered/04_paged_kv.ipynb", as_bytes(reordered()))
    expected["reordered"] = {"4.1": 2, "4.3": 1}
    reference = {"4.3": reference_answer()}
    put("the_reference/04_paged_kv.ipynb", as_bytes(lab(reference)))
    expected["the_reference"] = {"4.3": 1}

    # Files that are no notebooks, or hard to read.
    put("empty/04_paged_kv.ipynb", b"")
    put("not_json/04_paged_kv.ipynb", as_bytes(solved())[:500])
    put("json_of_something/04_paged_kv.ipynb", b"[1, 2, 3]")
    put("utf16/04_paged_kv.ipynb", as_bytes(solved()).decode().encode("utf-16"))
    put("brackets/04_paged_kv.ipynb", b"[" * 200_000)
    put("format_3/04_paged_kv.ipynb", as_bytes({"nbformat": 3, "worksheets": [], "metadata": {}}))
    put("huge/04_paged_kv.ipynb", b"{")
    os.truncate(root / "huge/04_paged_kv.ipynb", 200 << 20)  # a hole: takes no room on the disk
    put("broken_zip.zip", b"PK\x03\x04 and then nothing")
    for student in ("empty", "not_json", "json_of_something", "utf16", "brackets", "format_3", "huge", "broken_zip"):
        expected[student] = {}

    # What learning systems make of file names, and what students zip.
    put("doejane_4711_998877_04_paged_kv.ipynb", as_bytes(solved()))
    put("roerichard_LATE_4712_998878_04_paged_kv-2.ipynb", as_bytes(solved()))
    put("Jane Moodle_4713_assignsubmission_file_/lab.ipynb", as_bytes(solved()))
    put("flat.ipynb", as_bytes(solved()))
    expected |= {s: {"4.3": 1} for s in ("doejane_4711", "roerichard_4712", "Jane Moodle_4713", "flat")}
    put("late-one_4714_2026-11-30_14-05-09.ipynb", as_bytes(wrong()))
    put("late-one_4714_2026-11-30_15-05-09.ipynb", as_bytes(solved()))
    expected["late-one_4714"] = {"4.3": 1}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        formula = {"4.q4": "lambda requests, tokens: requests * (-tokens % 16)"}
        archive.writestr("notebooks/04_paged_kv.ipynb", json.dumps(lab({"4.3": answer(RIGHT["4.3"])}, formula)))
        archive.writestr("../../evil.txt", "x")
        archive.writestr("__MACOSX/notebooks/._04_paged_kv.ipynb", b"\x00\x05")
    put("zipped.zip", packed.getvalue())
    expected["zipped"] = {"4.3": 1, "4.q4": 0.5}
    put("formula_wrong/04_paged_kv.ipynb", as_bytes(lab({}, {"4.q4": "lambda requests, tokens: requests * tokens"})))
    expected["formula_wrong"] = {}
    put("formula_loops/04_paged_kv.ipynb", as_bytes(lab({}, {"4.q4": "lambda requests, tokens: sum(iter(int, 1))"})))
    expected["formula_loops"] = {}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("notebooks/04_paged_kv.ipynb", json.dumps(lab({}, {"4.q4": '"1,234"'})))
        archive.writestr("progress/progress.json", json.dumps({"student": "abc"}))
    put("own_numbers.zip", packed.getvalue())
    expected["own_numbers"] = {}  # the numbers drawn for "abc" give another
    put("unrelated/homework.ipynb", as_bytes({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": []}))
    expected["unrelated"] = {}
    return expected


def reference_answer() -> str:
    from checks.authoring.source import answer_source

    return answer_source(find("4.3"))


def gradebook(expected: dict[str, Points]) -> str:
    """The CSV that grading has to write, to the letter."""
    most = worth("04")
    lines = [",".join(["student", *most, "total", "max"])]
    for student in sorted(expected):
        points = [expected[student].get(item, 0.0) for item in most]
        cells = [f"{p:g}" for p in (*points, sum(points), sum(most.values()))]
        lines.append(",".join([student, *cells]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for student, points in sorted(write(Path(sys.argv[1])).items()):
        print(f"{student:28} {points}")
