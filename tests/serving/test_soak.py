"""The load test of `soak.py`, short: no token lost or crossed among disconnects, long prompts, preemptions."""

from __future__ import annotations

import asyncio
import os

from tests.serving.harness import metric, serving
from tests.serving.soak import ALLOWED_GROWTH, soak

SECONDS = float(os.environ.get("MINIVLLM_SOAK_SECONDS", "10"))


def test_every_token_of_64_streams_is_its_own_and_nothing_stays_behind() -> None:
    with serving("echo:5", "--max-num-seqs", "48", "--num-gpu-blocks-override", "500") as server:
        found = asyncio.run(soak(server, 64, SECONDS))
        assert found.faults == []
        for kind in ("complete", "left", "refused"):
            assert found.counts[kind] > 10, found.counts
        assert metric(server, "vllm:num_preemptions_total") > 0
        server.wait_until_idle()
        for name in found.memory:
            assert found.growth(name) < ALLOWED_GROWTH, (name, found.memory[name])
        assert server.terminate() == 0
