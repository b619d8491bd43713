"""What stands in the places of minivllm's own answers while an exercise is graded, and the guard before files that hold them.

The one thing here that changes is `touched`, what was reached for. It is told with each result; whoever clears it to hide that
has gained nothing, since there is no answer behind.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

WORDS = "is not here while the exercise is graded"
touched: list[str] = []


class Withheld(NotImplementedError):
    """minivllm's answer was called, or looked for on the disk."""


def refuse(name: str) -> NoReturn:
    """The body of every function that was taken out."""
    touched.append(name)
    raise Withheld(f"minivllm's {name} {WORDS}. Write it yourself.")


def guard(folders: Sequence[str]) -> None:
    """From now on, opening or importing a file in one of these folders fails, for this process. Python keeps such a hook for
    good. It is a sign, not a wall: C code can go around it, and where there are walls the files are not there at all."""
    places = tuple(os.path.realpath(folder) + os.sep for folder in folders)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], (str, bytes)) and args[0]:
            path = os.path.realpath(os.fsdecode(args[0]))
            if path.startswith(places):
                touched.append("source")
                raise Withheld(f"{os.path.basename(path)} {WORDS}.")

    sys.addaudithook(hook)
