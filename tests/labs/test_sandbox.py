"""The process a student's code runs in: whatever it does, the kernel goes on and the student learns what happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from checks.exercises import find
from checks.exercises.evaluate import Report, evaluate
from checks.sandbox import sandbox
from checks.sandbox.plain import Opaque, pack, unpack
from checks.sandbox.sandbox import HAS_FORK, Limits

ROOT = Path(__file__).resolve().parents[2]
SHORT = Limits(cpu_seconds=1, wall_seconds=2, memory_bytes=256 << 20, kept_output=100, output_bytes=1 << 20)
GOOD = """
    tokens = list(token_ids)
    for _ in range(max_new_tokens):
        tokens.append(int(model(torch.tensor(tokens))[-1].argmax()))
    return tokens[len(token_ids) :]
"""


def check_body(body: str, before: str = "import torch", fork: bool = HAS_FORK, limits: Limits = SHORT) -> Report:
    """Check an answer to 2.1 with this function body."""
    function = "def greedy_generate(model, token_ids, max_new_tokens):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    return evaluate(find("2.1"), f"{before}\n\n{function}", limits=limits, fork=fork)


def told(body: str, before: str = "import torch") -> tuple[str, str]:
    report = check_body(body, before)
    return report.verdict.category, report.verdict.message


def test_a_loop_without_end_is_stopped_and_the_next_check_runs() -> None:
    category, message = told("while True: pass")
    assert category == "time" and "loop that never ends" in message
    assert check_body(GOOD).passed


def test_sleeping_for_ever_is_stopped() -> None:
    assert told("import time\ntime.sleep(1000)")[0] == "time"


def test_printing_for_ever_is_stopped_and_the_output_is_cut() -> None:
    report = check_body("while True: print('again')")
    assert report.verdict.category in ("output", "time")
    assert report.output.startswith("again\nagain") and "output cut here" in report.output and len(report.output) < 300


def test_long_output_costs_nothing_and_is_cut() -> None:
    report = check_body("print('word ' * 500)\n" + textwrap.dedent(GOOD))
    assert report.passed and "output cut here" in report.output


def test_a_memory_hog_is_stopped() -> None:
    category, message = told("hog = []\nwhile True: hog.append(bytearray(10_000_000))")
    assert category == "memory" and "256 MiB" in message


def test_one_tensor_too_large_is_a_memory_message() -> None:
    assert told("return torch.zeros(10**10)")[0] == "memory"


@pytest.mark.parametrize("exit_call", ["import sys; sys.exit()", "exit()", "raise KeyboardInterrupt"])
def test_leaving_python_is_reported(exit_call: str) -> None:
    category, message = told(exit_call)
    assert category in ("exit", "undefined name") and message


def test_os_exit_is_reported_with_its_status() -> None:
    category, message = told("import os\nos._exit(7)")
    assert category == "exit" and "exit status 7" in message


def test_exiting_with_status_zero_is_not_a_pass() -> None:
    assert told("import os\nos._exit(0)")[0] == "exit"


def test_a_crash_of_python_is_reported() -> None:
    category, message = told("import ctypes\nctypes.string_at(0)")
    assert category == "exit" and "crashed" in message


def test_an_error_shows_the_students_lines_and_no_others() -> None:
    category, message = told("tokens = list(token_ids)\nreturn tokens[99]")
    assert category == "exception"
    assert "IndexError: list index out of range" in message and "line   5 | return tokens[99]" in message
    assert "child.py" not in message and "lab_02_run" not in message


def test_a_key_error_says_what_its_message_leaves_out() -> None:
    category, message = told("return {}['lost']")
    assert category == "exception" and "KeyError: a dict has no key 'lost'." in message


def test_a_warning_on_stderr_costs_nothing() -> None:
    assert check_body(
        "import sys, warnings\nwarnings.warn('beware')\nprint('hm', file=sys.stderr)\n" + textwrap.dedent(GOOD)
    ).passed


def test_a_missing_package_is_one_failure_that_names_it() -> None:
    category, message = told(GOOD, before="import torch\nimport no_such_package")
    assert category == "missing package" and "'no_such_package'" in message


def test_what_the_code_starts_does_not_outlive_the_check(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    body = f"import subprocess\nopen({str(mark)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid))\n"
    assert check_body(body + textwrap.dedent(GOOD)).passed
    for _ in range(50):
        if not _alive(int(mark.read_text())):
            return
        time.sleep(0.1)
    pytest.fail("a process started in a check is still there")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_writing_into_the_message_stream_is_no_pass() -> None:
    body = """
        import os
        for fd in range(3, 40):
            try: os.write(fd, b'\\x00\\x00\\x00\\x0f{"kind": "done"}')
            except OSError: pass
        return []
    """
    assert not check_body(body).passed


def test_an_object_that_equals_everything_is_no_pass() -> None:
    before = "import torch\nclass Always(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__"
    assert told("return [Always(1)] * max_new_tokens", before)[0] in ("wrong type", "wrong calls")


def test_nothing_is_printed_twice_for_the_cells_own_top_level() -> None:
    report = check_body(GOOD, before="import torch\nprint('while loading')")
    assert report.passed and report.output == ""


def test_the_fork_server_never_initializes_cuda_and_children_have_one_thread() -> None:
    report = check_body("print(torch.cuda.is_initialized(), torch.get_num_threads())\n" + textwrap.dedent(GOOD))
    assert report.passed and report.output.startswith("False 1\n")


def test_without_fork_the_same_is_said() -> None:
    limits = Limits(cpu_seconds=5, wall_seconds=10)
    assert check_body(GOOD, fork=False, limits=limits).passed
    assert check_body("while True: pass", fork=False, limits=Limits(cpu_seconds=1, wall_seconds=3)).verdict.category == "time"


@pytest.mark.skipif(not HAS_FORK, reason="needs fork")
def test_a_dead_fork_server_is_replaced() -> None:
    assert check_body(GOOD).passed
    server = sandbox._the_server
    assert server is not None
    os.kill(server._process.pid, signal.SIGKILL)
    server._process.wait(5)
    assert check_body(GOOD).passed


@pytest.mark.skipif(not HAS_FORK, reason="needs fork")
def test_an_interrupt_ends_the_check_and_the_next_one_runs() -> None:
    assert check_body(GOOD).passed
    threading.Timer(0.3, lambda: signal.raise_signal(signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        check_body("import time\ntime.sleep(30)", limits=Limits(wall_seconds=20))
    assert check_body(GOOD).passed


@pytest.mark.skipif(not HAS_FORK, reason="needs fork")
def test_the_fork_server_ends_with_its_kernel_even_if_that_is_killed() -> None:
    code = (
        "from checks.sandbox import sandbox\n"
        "server = sandbox._server(); server._read(60); print(server._process.pid, flush=True)\n"
        "import time; time.sleep(60)"
    )
    kernel = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert kernel.stdout is not None
    pid = int(kernel.stdout.readline())
    assert _alive(pid)
    kernel.kill()
    kernel.wait()
    for _ in range(100):
        if not _alive(pid):
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the fork server outlived its kernel")


@pytest.mark.skipif(not HAS_FORK, reason="needs fork")
def test_two_kernels_check_at_once_and_do_not_meet() -> None:
    code = (
        "import sys\nsys.path.insert(0, 'tests/labs')\nfrom test_sandbox import GOOD, check_body\n"
        "assert all(check_body(GOOD).passed for _ in range(5))\nprint('fine')"
    )
    kernels = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [kernel.communicate(timeout=120)[0].strip() for kernel in kernels] == ["fine", "fine"]


# ------------------------------------------------------------------------------------------------------ plain data


def test_plain_data_comes_back_as_it_was() -> None:
    import torch

    value = {"a": [1, 2.5, None, True], 3: ("x", float("-inf")), "empty": torch.empty(0, 3)}
    back = unpack(pack(value))
    assert back["a"] == value["a"] and back[3] == value[3] and list(back["empty"].shape) == [0, 3]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_tensors_come_back_bit_for_bit(dtype: str) -> None:
    import torch

    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype))
    back = unpack(pack(tensor))
    assert back.dtype == tensor.dtype and torch.equal(back, tensor)


def test_what_parses_and_does_not_compile_is_told_with_its_line() -> None:
    category, message = told(GOOD, before="import torch\n\nreturn 5")
    assert category == "exception" and "'return' outside function" in message


def test_a_cell_may_await_at_its_top_level_as_in_a_notebook() -> None:
    assert check_body(GOOD, before="import asyncio\n\nimport torch\n\nnothing = await asyncio.sleep(0)").passed


def test_objects_arrive_as_their_type_name() -> None:
    assert unpack(pack([object(), lambda: 0])) == [Opaque("object"), Opaque("function")]


@pytest.mark.parametrize(
    "forged", [{"$tensor": ["float32", [2], ""]}, {"$tensor": ["object", [1], ""]}, {"$code": "x"}, {"a": 1, "b": 2}]
)
def test_forged_data_is_refused(forged: object) -> None:
    with pytest.raises(ValueError, match="not plain data"):
        unpack(forged)
