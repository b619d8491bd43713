"""`make fuzz`: minutes of search for what the tests' few examples miss.  python -m tests.fuzz --seconds 600

Each round runs every searching test with other random examples; the first that fails ends it, and is shown with the smallest
example and the line that makes it a test. Nothing is kept between runs but what hypothesis keeps in .hypothesis/.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGETS = [
    "core/test_state_machines.py",
    "core/test_engine_properties.py",
    "serving/test_router_machine.py",
    "serving/test_strange_bodies.py",
    "models/test_gguf.py",
    "models/test_weights.py",
    "text",
    "labs/test_strange_files.py",
    "labs/test_quiz_files.py",
    "attention/test_numerics.py",
    "sampling",
    "spec_decode/test_rejection.py",
]


def search(target: str, seed: int, seconds: float) -> int | None:
    """pytest's exit code; None where the time ended first, or nothing in it searches."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "hypothesis"]
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "round"}
    process = subprocess.Popen([*command, f"--hypothesis-seed={seed}", f"tests/{target}"], cwd=ROOT, env=environment)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # so that fixtures end what they started
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        return None
    return None if code == 5 else code  # 5: no test was selected


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    deadline = time.monotonic() + parser.parse_args().seconds
    rounds = 0
    while True:
        for target in TARGETS:
            left = deadline - time.monotonic()
            if left <= 1:
                print(f"Nothing found in {rounds} whole rounds.")
                return 0
            seed = random.randrange(2**32)
            print(f"-- {target}, seed {seed}, {left:.0f} s left", flush=True)
            if code := search(target, seed, left):
                return code
        rounds += 1


if __name__ == "__main__":
    sys.exit(main())
