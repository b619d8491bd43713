"""One step of a trace as HTML: what the scrubber shows. Built as a string, so that a slider can move without drawing anything.
Pure Python; no scripts, no outside resources.
"""

from __future__ import annotations

from html import escape

from minivllm.observe.palette import FREE_COLOR, SHARED_COLOR, owner_color
from minivllm.observe.trace import StepRecord, Trace

MAX_CELLS = 640  # blocks drawn; a larger pool shows its lower part and says so

_STRIPES = "repeating-linear-gradient(45deg, transparent 0 3px, rgba(255,255,255,.65) 3px 5px)"
_CELL = "display:inline-block;width:22px;height:17px;margin:1px;font:10px/17px sans-serif;text-align:center;vertical-align:top;"
_TD = 'style="text-align:left;padding:1px 10px 1px 0"'


def step_html(trace: Trace, place: int) -> str:
    """Step number `place`: the budget as a bar, the queues, who got which tokens, and who holds which block. Raises ValueError
    for a step that is not in the trace."""
    if not 0 <= place < len(trace.steps):
        raise ValueError(f"Step {place} is not in the trace: it has steps 0 to {len(trace.steps) - 1}.")
    colors = {request_id: owner_color(i) for i, request_id in enumerate(trace.requests)}
    step = trace.steps[place]
    parts = (
        _heading(trace, place),
        _budget_bar(trace, step, colors),
        _queues(trace, step, colors),
        _table(step, colors),
        _blocks(trace, step, colors),
    )
    return f'<div style="font-size:13px;max-width:760px">{"".join(parts)}</div>'


def _heading(trace: Trace, place: int) -> str:
    step = trace.steps[place]
    parts = ", ".join(
        f"{name} {seconds * 1000:.2f}"
        for name, seconds in (
            ("schedule", step.schedule_s),
            ("execute", step.execute_s),
            ("sample", step.sample_s),
            ("update", step.update_s),
        )
    )
    failed = f"<br><b>The step failed:</b> {escape(step.error)}" if step.error else ""
    return f"<p><b>Step {place}</b> of {len(trace.steps) - 1}, at {step.start:.3f} s ({parts} ms){failed}</p>"


def _budget_bar(trace: Trace, step: StepRecord, colors: dict[str, str]) -> str:
    budget = max(trace.max_num_batched_tokens, step.num_tokens, 1)
    segments = []
    for request_id, tokens in step.tokens.items():
        what = "prefill" if tokens.is_prefill else "decode"
        stripes = f"background-image:{_STRIPES};" if tokens.is_prefill else ""
        wide = tokens.num_tokens / budget > 0.04
        segments.append(
            f'<span title="request {escape(request_id)}: {what}, {tokens.num_tokens} tokens" style="display:inline-block;'
            f"width:{100 * tokens.num_tokens / budget:.2f}%;height:20px;background-color:{colors[request_id]};{stripes}"
            f'box-sizing:border-box;border-right:1px solid white;overflow:hidden">'
            f"{_tag(request_id) if wide else ''}</span>"
        )
    return (
        f"<p>Budget: {step.num_tokens} of {trace.max_num_batched_tokens} tokens, {step.num_decode_tokens} of them decode, "
        f"{step.num_prefill_tokens} prefill (striped)</p>"
        f'<div style="background:#e8e8e8;height:20px;white-space:nowrap;font-size:0">{"".join(segments)}</div>'
    )


def _queues(trace: Trace, step: StepRecord, colors: dict[str, str]) -> str:
    waiting = [
        request.request_id
        for request in trace.requests.values()
        if request.arrival <= step.end
        and request.request_id not in step.blocks
        and (request.finish is None or request.finish > step.end)
    ]
    lines = [("running", list(step.blocks)), ("waiting", waiting), ("preempted in this step", step.preempted)]
    lines.append(("ended in this step", step.finished))
    shown = [f"{name}: {' '.join(_chip(i, colors) for i in ids) or 'nobody'}" for name, ids in lines[:2]]
    shown += [f"<b>{name}</b>: {' '.join(_chip(i, colors) for i in ids)}" for name, ids in lines[2:] if ids]
    return f"<p>After it: {'; '.join(shown)}</p>"


def _table(step: StepRecord, colors: dict[str, str]) -> str:
    rows = []
    for request_id, tokens in step.tokens.items():
        first, last = tokens.num_computed, tokens.num_computed + tokens.num_tokens - 1
        what = f"prefill {tokens.num_tokens}" if tokens.is_prefill else f"decode {tokens.num_tokens}"
        if tokens.num_drafts:
            what += f" ({tokens.num_accepted} of {tokens.num_drafts} drafts right)"
        if step.cached_tokens.get(request_id):
            what += f", on top of {step.cached_tokens[request_id]} cached"
        sampled = ", ".join(map(str, step.sampled.get(request_id, []))) or "none"
        cells = (
            _chip(request_id, colors),
            what,
            f"{first}" if first == last else f"{first} to {last}",
            sampled,
            len(step.blocks.get(request_id, [])),
        )
        rows.append("<tr>" + "".join(f"<td {_TD}>{cell}</td>" for cell in cells) + "</tr>")
    heads = ("request", "tokens", "positions", "sampled", "blocks held")
    head = "".join(f'<th scope="col" {_TD}>{name}</th>' for name in heads)
    body = "".join(rows)
    return f'<table style="font-size:13px"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _blocks(trace: Trace, step: StepRecord, colors: dict[str, str]) -> str:
    holders: dict[int, list[str]] = {}
    for request_id, table in step.blocks.items():
        for block_id in table:
            holders.setdefault(block_id, []).append(request_id)
    last = max(trace.num_blocks - 1, *holders, 0) if holders else trace.num_blocks - 1
    cells = [_block(block_id, holders.get(block_id, []), step, colors) for block_id in range(1, min(last, MAX_CELLS) + 1)]
    rest = f" {last - MAX_CELLS} more blocks are not drawn." if last > MAX_CELLS else ""
    return (
        f"<p>Blocks: {step.num_free_blocks} of {trace.num_blocks - 1} free, {len(step.taken)} taken (thick edge),"
        f" {len(step.freed)} freed (dotted edge), {len(step.evicted)} cached ones evicted (&times;), shared dark.{rest}</p>"
        f'<div style="line-height:0">{"".join(cells)}</div>'
    )


def _block(block_id: int, holders: list[str], step: StepRecord, colors: dict[str, str]) -> str:
    color, text, who = FREE_COLOR, "", "free"
    if len(holders) > 1:
        color, text, who = SHARED_COLOR, f"{len(holders)}", "shared by " + ", ".join(holders)
    elif holders:
        color, text, who = colors[holders[0]], holders[0], "request " + holders[0]
    edge = "1px solid #bbb"
    if block_id in step.taken:
        edge = "2px solid black"
    elif block_id in step.freed:
        edge = "1px dotted black"
    lost = "&times;" if block_id in step.evicted else ""
    ink = "white" if len(holders) > 1 else "black"
    style = f"{_CELL}box-sizing:border-box;background:{color};color:{ink};border:{edge};line-height:14px;overflow:hidden"
    return f'<span title="block {block_id}: {escape(who)}" style="{style}">{lost}{escape(text[:3])}</span>'


def _chip(request_id: str, colors: dict[str, str]) -> str:
    color = colors.get(request_id, FREE_COLOR)
    return f'<span style="border-left:10px solid {color};padding-left:3px">{escape(request_id)}</span>'


def _tag(request_id: str) -> str:
    style = "font:11px/20px sans-serif;background:rgba(255,255,255,.8);color:black;padding:0 2px;margin-left:2px"
    return f'<span style="{style}">{escape(request_id)}</span>'
