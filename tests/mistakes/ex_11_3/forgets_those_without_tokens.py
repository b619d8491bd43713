# expect: A request that failed before its first token has no times.
import asyncio
import time
from itertools import pairwise


def poisson_arrivals(rate, n, rng):
    times, now = [], 0.0
    for _ in range(n):
        now += rng.expovariate(rate)
        times.append(now)
    return times


async def open_loop(ask, arrivals):
    begin = time.perf_counter()

    async def one(i, due):
        await asyncio.sleep(begin + due - time.perf_counter())
        times = []
        try:
            async for _ in ask(i):
                times.append(time.perf_counter() - begin)
        except Exception:
            pass
        return due, times

    return await asyncio.gather(*(one(i, due) for i, due in enumerate(arrivals)))


def measure(requests, max_ttft, max_tpot):
    ttft, tpot, itl, good = [], [], [], 0
    for due, times in requests:
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
