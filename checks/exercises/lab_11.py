"""Lab 11's checks: text out of tokens, outputs to their readers, and a load that does not wait. In the parent only.

The judges are in lab_11_text.py (11.1), lab_11_route.py (11.2) and lab_11_load.py (11.3).
"""

from __future__ import annotations

from checks.exercises import Check
from checks.exercises.lab_11_load import judge_load, load_cases
from checks.exercises.lab_11_route import judge_route, route_cases
from checks.exercises.lab_11_text import judge_push, push_cases

CHECKS = {
    "11.1": Check(
        cases=push_cases,
        judge=judge_push,
        minutes=15,
        difficulty=2,
        hints=(
            "Texts of single tokens do not add up, their bytes do. Who remembers the bytes of a character that is not"
            " complete yet? Look at what `__init__` makes.",
            "self.utf8 is a decoder with a memory: self.utf8.decode(data) gives the characters that are whole now, and keeps"
            " the rest for the next call. A hidden token adds nothing, and is not the first of the text either.",
            'if token_id is in self.hidden_ids: return ""\nremember whether self.at_start was set, and clear it\n'
            "return self.utf8.decode of self.bytes_of(token_id, what you remembered)",
        ),
    ),
    "11.2": Check(
        cases=route_cases,
        judge=judge_route,
        minutes=20,
        difficulty=2,
        hints=(
            "self.queues is the whole state: which requests somebody waits for. When does a request enter it, and which two"
            " events take it out?",
            "route: no queue, nothing to do. Else put; and an output that is `finished` was the last, so the queue goes. leave:"
            " only for a request that is still in self.queues does anybody have to be told.",
            "open: queue = OutputQueue(), kept in self.queues; return OutputStream(request_id, queue, self.leave)\n"
            "route: queue = self.queues.get(request_id); if it is None: return; queue.put(output); if output.finished: del\n"
            "leave: if self.queues.pop(request_id, None) is not None: self.abort(request_id)",
        ),
    ),
    "11.3": Check(
        cases=load_cases,
        judge=judge_load,
        minutes=25,
        difficulty=2,
        hints=(
            "The pauses of a Poisson process are exponentially distributed. In open_loop every request needs a task of its own"
            " that first sleeps until it is due: whoever waits for an answer before sending the next runs a closed loop.",
            "rng.expovariate(rate) is one pause, in seconds. asyncio.gather(*...) runs coroutines side by side and gives their"
            " results in order. TTFT is the first time minus `due`; TPOT is what lies between first and last token, divided by"
            " their number minus one.",
            "async def one(i, due): await asyncio.sleep(begin + due - time.perf_counter()); times = []; try: async for _ in"
            " ask(i): append the clock minus begin; except Exception: pass; return due, times\n"
            "return await asyncio.gather(*(one(i, due) for i, due in enumerate(arrivals)))",
        ),
    ),
}
