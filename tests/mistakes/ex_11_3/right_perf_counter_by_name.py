# expect: passed
import asyncio
import time
from itertools import pairwise


from time import perf_counter

import numpy as np


def poisson_arrivals(rate, n, rng):
    return np.cumsum([rng.expovariate(rate) for _ in range(n)])


async def open_loop(ask, arrivals):
    start = perf_counter()
    records = []

    async def one(i, due, times):
        await asyncio.sleep(max(0, start + due - perf_counter()))
        try:
            async for _token in ask(i):
                times += [perf_counter() - start]
        except OSError:
            return

    for due in arrivals:
        records.append((due, []))
    await asyncio.gather(*[one(i, *record) for i, record in enumerate(records)])
    return tuple(records)


def measure(requests, max_ttft, max_tpot):
    ttft, tpot, itl, good = [], [], [], 0
    for due, times in requests:
        if not times:
            continue
        gaps = [b - a for a, b in pairwise(times)]
        ttft.append(times[0] - due)
        itl += gaps
        if gaps:
            tpot.append(sum(gaps) / len(gaps))
        good += ttft[-1] <= max_ttft and (not gaps or tpot[-1] <= max_tpot)
    if not ttft:
        return {"ttft": [], "tpot": [], "itl": [], "goodput": 0.0}
    begin = min(due for due, _ in requests)
    end = max(times[-1] for _, times in requests if times)
    return {"ttft": ttft, "tpot": tpot, "itl": itl, "goodput": good / (end - begin)}
