"""Set up a virtual environment for this clone. Runs on a bare Python: standard library only.

    python checks/install.py [--venv .venv] [--extras all]

PyTorch comes first and with care: on Linux its default build brings gigabytes of CUDA libraries. On a machine without an
NVIDIA GPU a CPU build is looked for, first where pip is already told to look on this machine, then on PyTorch's CPU index.
A PyTorch that is already in the environment is never touched.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ROOT = Path(__file__).resolve().parent.parent


def torch_requirement() -> str:
    """The range pyproject.toml asks for, read without a TOML parser (Python 3.10 has none)."""
    for line in (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines():
        entry = line.strip().rstrip(",").strip('"')
        if entry.startswith("torch>"):
            return entry
    raise SystemExit("pyproject.toml names no torch requirement")


def has_nvidia_gpu() -> bool:
    if Path("/proc/driver/nvidia/version").exists():
        return True
    smi = shutil.which("nvidia-smi")
    try:
        return smi is not None and subprocess.run([smi, "-L"], capture_output=True, timeout=20, check=False).returncode == 0
    except subprocess.TimeoutExpired:  # a driver that hangs
        return False


def ensure_venv(folder: Path) -> Path:
    """The environment's python, made if there is none."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        print(f"Making a virtual environment in {folder} (Python {sys.version.split()[0]})", flush=True)
        venv.create(folder, with_pip=True)
    return python


def pip(python: Path, *args: str, check: bool = True) -> bool:
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *args]
    done = subprocess.run(command, check=False)
    if check and done.returncode != 0:
        raise SystemExit(f"This failed: {' '.join(command)}\nSee pip's message above; then run the same command again.")
    return done.returncode == 0


def install_torch(python: Path) -> None:
    found = subprocess.run(
        [str(python), "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"], check=False
    )
    if found.returncode == 0:
        return
    want = torch_requirement()
    if sys.platform != "linux" or has_nvidia_gpu():
        pip(python, want)
        return
    print("No NVIDIA GPU here: looking for a CPU build of PyTorch", flush=True)
    if pip(python, "-q", "--no-index", "--no-deps", want, check=False):  # a folder pip is configured to look in (find-links)
        return
    if pip(python, "--index-url", CPU_INDEX, "--timeout", "15", "--retries", "1", want, check=False):
        return
    print(f"No CPU build could be reached ({CPU_INDEX}): taking PyPI's, which may be several gigabytes.", flush=True)
    pip(python, want)


def main() -> None:
    if not (3, 10) <= sys.version_info[:2] < (3, 14):
        raise SystemExit(f"minivllm needs Python 3.10 to 3.13, this is {sys.version.split()[0]}. Try: make PYTHON=python3.12")
    parser = argparse.ArgumentParser(description="Set up a virtual environment for this clone.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--extras", default="", help="labs, serve, dev or all")
    args = parser.parse_args()
    python = ensure_venv(args.venv)
    install_torch(python)
    target = f"{ROOT}[{args.extras}]" if args.extras else str(ROOT)
    pip(python, "-q", "-e", target)


if __name__ == "__main__":
    main()
