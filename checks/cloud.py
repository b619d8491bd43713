"""ready(), in every lab's first code cell: on Colab and other rented machines it installs what is missing.

Where everything is here, which is everywhere else, it does nothing, in a few milliseconds. It never installs, upgrades or
downgrades torch or numpy: those of a rented machine fit its GPU. Imports the standard library alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks.doctor import ONLY_FOR, installed_version, older, requirements

# Where the labs are published, "OWNER/NAME" on GitHub. Maintainers set it, then run `python -m checks build`: each lab's first
# cell then fetches the labs where they are not. While it is empty, that cell says that they have to be brought.
REPOSITORY = ""
NEVER = ("torch", "numpy")
IMPORTED_AS = {"huggingface-hub": "huggingface_hub", "pyyaml": "yaml"}


_CELL = """\
# On Colab and other rented machines this installs what is missing. Where all is here, it does nothing.
import importlib.util
{imports}
if importlib.util.find_spec("checks") is None:
{fetch}
from checks.cloud import ready

ready()"""
_BRING = """\
    raise ModuleNotFoundError(
        "No module named 'checks': this notebook runs outside of the labs' folder, or in another Python. Bring the"
        " whole folder to this machine and open the notebook in its labs/, or choose the kernel of its .venv."
    )"""
_CLONE = """\
    if not os.path.isdir("minivllm-labs"):
        url = "https://github.com/{repository}"
        subprocess.run(["git", "clone", "--depth=1", url, "minivllm-labs"], check=True)
    sys.path.insert(0, os.path.abspath("minivllm-labs"))"""


def first_cell(repository: str = REPOSITORY) -> str:
    """The cell that the builder puts in front of each lab's first code. Plain Python, like all cells."""
    if not repository:
        return _CELL.format(imports="", fetch=_BRING)
    return _CELL.format(imports="import os\nimport subprocess\nimport sys\n", fetch=_CLONE.format(repository=repository))


def is_rented() -> bool:
    """Whether this is a machine that is made anew for each session, where installing is nobody's loss. MINIVLLM_INSTALL=1 says
    so too."""
    asked = os.environ.get("MINIVLLM_INSTALL", "0") not in ("", "0")
    return asked or any(name in os.environ for name in ("COLAB_RELEASE_TAG", "COLAB_GPU", "KAGGLE_KERNEL_RUN_TYPE"))


def missing() -> list[str]:
    """What the labs need and this Python lacks, or has too old, as pip is told it: "transformers>=5"."""
    found = []
    for group, name, minimum in requirements():
        have = installed_version(name)
        if group != "serve" and name not in ONLY_FOR and (have is None or older(have, minimum)):
            found.append(f"{name}>={minimum}")
    return found


def ready() -> None:
    """Install what is missing on a rented machine; elsewhere say what is, if anything. Says what it will do, and that the
    kernel has to be restarted, before it does anything; raises RuntimeError where the notebook cannot go on."""
    wanted = missing()
    if not wanted:
        return
    if not is_rented():
        print(f"Missing in this Python: {', '.join(wanted)}. `python -m checks doctor` says what to do.")
        return
    by_hand = [one for one in wanted if one.partition(">=")[0] in NEVER]
    if by_hand:
        raise RuntimeError(
            f"This needs {' and '.join(by_hand)}, which is not changed here. Choose a newer runtime of the machine."
        )
    in_use = [name for one in wanted if _module(name := one.partition(">=")[0]) in sys.modules]
    print(f"Installing {', '.join(wanted)}.")
    if in_use:
        print(f"The kernel uses an older {' and '.join(in_use)}: after this it must be RESTARTED (Runtime > Restart session).")
    _install(wanted)
    if in_use:
        raise RuntimeError("Installed. Restart the kernel now (Runtime > Restart session), then run the notebook from its top.")
    importlib.invalidate_caches()


def _module(name: str) -> str:
    return IMPORTED_AS.get(name, name)


def _install(wanted: list[str]) -> None:
    """pip, told to leave torch and numpy as they are."""
    with tempfile.TemporaryDirectory() as folder:
        pinned = Path(folder) / "constraints.txt"
        pinned.write_text("".join(f"{name}=={have}\n" for name in NEVER if (have := installed_version(name))))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(pinned), *wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = "\n".join(f"  {line}" for line in done.stderr.strip().splitlines()[-4:])
        raise RuntimeError(f"pip could not install {', '.join(wanted)}:\n{said}")
