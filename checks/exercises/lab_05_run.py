"""Lab 05, beside the student's code: runs in the child, and knows no answer. lab_05.py judges what comes back.

A scheduler is driven through a script, as the engine would drive it, with requests that are plain numbers. No model runs.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from checks.exercises import Case
from minivllm.config import EngineConfig
from minivllm.core.block_pool import BlockPool
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.step import FinishReason, SchedulerOutput, StepOutput
from minivllm.sampling_params import SamplingParams

BLOCK_SIZE = 4
NEW_TOKEN = 5  # what every request is given in every step


def run_wasted(module: ModuleType, case: Case) -> dict[str, Any]:
    lengths = list(case["lengths"])
    return {"returned": module.wasted_slots(lengths, case["batch_size"]), "lengths": lengths}


# ------------------------------------------------------------------------------------------------------ 5.2 finish_reason


def run_finish(module: ModuleType, case: Case) -> dict[str, Any]:
    request = Request(
        "A",
        list(case["prompt"]),
        SamplingParams(),
        max_tokens=case["max_tokens"],
        stop_eos_ids=frozenset(case["stop_eos_ids"]),
        stop_token_ids=frozenset(case["stop_token_ids"]),
        worker_eos_ids=(7,),
    )
    request.all_token_ids += case["outputs"]
    scheduler = new_scheduler(module, {})
    before = _all_of(request)
    returned = scheduler.finish_reason(request, case["outputs"][-1])
    is_reason = isinstance(returned, FinishReason)
    return {
        "returned": returned.value if is_reason else returned,
        "is_reason": is_reason,
        "changed": _all_of(request) != before,
    }


def _all_of(request: Request) -> str:
    return repr(
        {name: getattr(request, name) for name in dir(request) if not callable(getattr(request, name)) and name[0] != "_"}
    )


# --------------------------------------------------------------------------------------------------- a scheduler, driven


def new_scheduler(module: ModuleType, settings: dict[str, Any]) -> Any:
    """The student's class with these settings, over minivllm's pool and manager."""
    given: dict[str, Any] = {
        "budget": 64,
        "seats": 8,
        "blocks": 100,
        "policy": "fcfs",
        "caching": False,
        "threshold": 0,
        "chunks": None,
    }
    given |= {name: value for name, value in settings.items() if name in given}
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=given["budget"],
        max_num_seqs=given["seats"],
        scheduling_policy=given["policy"],
        enable_chunked_prefill=given["chunks"],
        long_prefill_token_threshold=given["threshold"],
    ).fit_max_model_len(1 << 20, given["blocks"] + 1)
    pool = BlockPool(given["blocks"] + 1)  # one more: the null block
    assert config.max_model_len is not None
    manager = KVCacheManager(pool, BLOCK_SIZE, config.max_model_len, enable_caching=given["caching"])
    cls = module.Scheduler
    if not issubclass(cls, Scheduler):  # its base was taken away: the queues come from there
        cls = type("Scheduler", (cls, Scheduler), {})
    return cls(config, manager)


def new_request(name: str, prompt: list[int] | int, outputs: int, priority: int = 0) -> Request:
    """A prompt that is a number is so many tokens that nobody else has."""
    if isinstance(prompt, int):
        prompt = [1000 * ord(name) + i for i in range(prompt)]
    return Request(name, prompt, SamplingParams(), max_tokens=outputs, priority=priority)


def run_steps(module: ModuleType, case: Case) -> dict[str, Any]:
    """A script: ["add", name, prompt, outputs, priority], ["schedule"], ["update"] (the oldest step in flight comes back). The
    trace has what each `schedule` planned and left behind."""
    scheduler = new_scheduler(module, case)
    own = [m for m in ("schedule",) if m in vars(module.Scheduler)]
    closed: list[SchedulerOutput] = []
    close_step = scheduler.close_step

    def watched(step: SchedulerOutput) -> SchedulerOutput:
        closed.append(step)
        return close_step(step)  # type: ignore[no-any-return]

    scheduler.close_step = watched
    in_flight: list[tuple[SchedulerOutput, dict[str, list[int]]]] = []
    trace: list[Any] = []
    for name, *arguments in case["script"]:
        if name == "add":
            scheduler.add_request(new_request(*arguments))
        elif name == "update":
            step, sampled = in_flight.pop(0)
            scheduler.update_from_output(step, StepOutput(sampled))
        else:
            step = scheduler.schedule()
            if not isinstance(step, SchedulerOutput) or not any(step is other for other in closed):
                return {"trace": [*trace, {"returned": _kind_of(step)}], "own": own}
            trace.append(_plan(scheduler, step))
            in_flight.append((step, _sampled(scheduler, step)))
    return {"trace": trace, "own": own, "capabilities": capabilities_of(module.Scheduler)}


def _kind_of(step: Any) -> str:
    return "a step that is not closed" if isinstance(step, SchedulerOutput) else "None" if step is None else type(step).__name__


def _plan(scheduler: Any, step: SchedulerOutput) -> dict[str, Any]:
    return {
        "scheduled": [[name, n] for name, n in step.num_scheduled_tokens.items()],
        "running": [request.request_id for request in scheduler.running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "preempted": list(step.preempted_req_ids),
        "total": step.total_num_scheduled_tokens,
        "computed": {request.request_id: request.num_computed_tokens for request in scheduler.running},
    }


def _sampled(scheduler: Any, step: SchedulerOutput) -> dict[str, list[int]]:
    """A token for each request of a step that reached the end of what is known of it."""
    known = [scheduler.requests[name] for name in step.num_scheduled_tokens]
    return {r.request_id: [NEW_TOKEN] if r.num_computed_tokens == r.num_tokens else [] for r in known}


def capabilities_of(cls: type) -> list[str] | None:
    found = vars(cls).get("capabilities")
    return sorted(map(str, found)) if isinstance(found, (set, frozenset, list, tuple)) else None


# ------------------------------------------------------------------------------------------- 5.4 pick_victim and preempt


def run_preempt(module: ModuleType, case: Case) -> dict[str, Any]:
    """Requests ["name", prompt, outputs so far, priority] run; those of `waiting` wait. Then a script of "pick" (and preempt
    the one picked) or "preempt NAME"; the trace has what it left behind."""
    scheduler = new_scheduler(module, case)
    own = [m for m in ("pick_victim", "preempt") if m in vars(module.Scheduler)]
    for name, prompt, num_outputs, priority in case["running"]:
        _make_running(scheduler, new_request(name, prompt, 100, priority), num_outputs)
    for name, prompt, _, priority in case["waiting"]:
        scheduler.add_request(new_request(name, prompt, 100, priority))
    requests = dict(scheduler.requests)
    for request in scheduler.running:
        request.num_preemptions = case.get("num_preemptions", 0)
        if "came" in case:
            request.arrival_time = case["came"].index(request.request_id) - 100.0  # before all who wait
    trace: list[Any] = []
    for word in case["script"]:
        before = list(scheduler.running)
        picked = scheduler.pick_victim() if word == "pick" else requests[word.removeprefix("preempt ")]
        taken_out = picked in before and picked not in scheduler.running
        name = getattr(picked, "request_id", None)
        if not isinstance(picked, Request) or picked not in scheduler.running:
            shown = name if isinstance(picked, Request) else _shown(picked)
            trace.append({"picked": shown, "is_request": False, "taken_out": taken_out})
            break
        scheduler.preempt(picked)
        trace.append({"picked": name, "is_request": True, "taken_out": False, **_state(scheduler, picked)})
    return {"trace": trace, "own": own}


def _make_running(scheduler: Any, request: Request, num_outputs: int) -> None:
    """Running, as if it had been admitted and had gained so many tokens, the last of which has no KV yet. A draft is"
    " pending."""
    scheduler.add_request(request)
    step = scheduler.open_step()
    scheduler.admit(step, request, request.num_tokens)
    scheduler.close_step(step)
    request.num_in_flight_tokens = 0
    for _ in range(num_outputs - 1):
        request.all_token_ids.append(NEW_TOKEN)
        scheduler.kv_cache_manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
    request.all_token_ids.append(NEW_TOKEN)
    request.spec_token_ids = [NEW_TOKEN]
    scheduler.preempted_req_ids = []


def _shown(value: Any) -> Any:
    return value if value is None or type(value) in (int, str, bool) else type(value).__name__


def _state(scheduler: Any, request: Request) -> dict[str, Any]:
    manager = scheduler.kv_cache_manager
    return {
        "status": str(getattr(request.status, "value", request.status)),
        "num_tokens": request.num_tokens,
        "num_computed_tokens": request.num_computed_tokens,
        "drafts": list(request.spec_token_ids),
        "num_preemptions": request.num_preemptions,
        "held": len(manager.get_block_ids(request)),
        "free": manager.block_pool.num_free_blocks,
        "still_cached": len(manager.find_longest_cache_hit(request)) if manager.enable_caching else 0,
        "running": [r.request_id for r in scheduler.running],
        "waiting": [r.request_id for r in scheduler.waiting],
        "told": list(scheduler.preempted_req_ids),
    }


RUN = {"5.1": run_wasted, "5.2": run_finish, "5.3": run_steps, "5.4": run_preempt}
