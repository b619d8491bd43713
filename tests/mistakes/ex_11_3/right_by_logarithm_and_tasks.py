# expect: passed
import asyncio
import time
from itertools import pairwise


import math


def poisson_arrivals(rate, n, rng):
    times = []
    for _ in range(n):
        times.append((times[-1] if times else 0) - math.log(1 - rng.random()) / rate)
    return times


async def open_loop(ask, arrivals):
    loop = asyncio.get_running_loop()
    begin = loop.time()
    results = [[due, []] for due in arrivals]

    async def send(i):
        try:
            async for _ in ask(i):
                results[i][1].append(loop.time() - begin)
        except ConnectionError as error:
            print(error)

    tasks = []
    for i, due in enumerate(arrivals):
        wait = begin + due - loop.time()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(send(i)))
    for task in tasks:
        await task
    return results


def measure(requests, max_ttft, max_tpot):
    served = [(due, times) for due, times in requests if times]
    ttft = [times[0] - due for due, times in served]
    tpot = [(times[-1] - times[0]) / (len(times) - 1) for _, times in served if len(times) > 1]
    itl = [b - a for _, times in served for a, b in zip(times[:-1], times[1:])]
    good = [
        due
        for due, times in served
        if times[0] - due <= max_ttft and (times[-1] - times[0]) <= max_tpot * (len(times) - 1) + 1e-12
    ]
    seconds = max((t for _, times in served for t in times), default=0) - min(due for due, _ in requests)
    return {"ttft": ttft, "tpot": tpot, "itl": itl, "goodput": len(good) / seconds if served else 0}
