"""Lab 09's checks: a step that can be captured, buckets and padding, capture and replay. In the parent only.

The judges are in lab_09_step.py (9.1) and lab_09_graphs.py (9.2, 9.3).
"""

from __future__ import annotations

from checks.exercises import Check
from checks.exercises.lab_09_graphs import fill_cases, graph_cases, judge_fill, judge_graphs
from checks.exercises.lab_09_step import judge_repair, repair_cases

CHECKS = {
    "9.1": Check(
        cases=repair_cases,
        judge=judge_repair,
        minutes=15,
        difficulty=2,
        hints=(
            "Copy the broken step into the cell first and run it: the check names every line that is left. Then ask of each:"
            " where does what it reads come from, and will it be there, in the same memory, when a replay comes?",
            "All that changes from step to step is in `buffers` already: input_ids, positions, slot_mapping, seq_lens,"
            " block_tables. What is only a look at the numbers, for safety's sake, can stand outside the step.",
            "Padding rows need not be left out: their slot is 0, in the null block, which is nobody's. So write all rows. And"
            " the whole width of the block tables may be passed on: seq_lens says how much of it counts. In the end `host` is"
            " not used at all.",
        ),
    ),
    "9.2": Check(
        cases=fill_cases,
        judge=judge_fill,
        minutes=15,
        difficulty=2,
        hints=(
            "pick_bucket: self.buckets is sorted; which is the first that is not smaller than n? fill: what must a row look"
            " like that computes something, harms nobody, and reads only what it wrote itself?",
            "A padding row is one token at position 0 of a sequence that lives in block 0: slot 0, seq_len 1, a block table of"
            " zeros. Rows n to bucket - 1 hold an earlier step's numbers until you write there.",
            "For each of the five names: take array = inputs.NAME, make it `bucket` rows long with padded(array, bucket,"
            " value), put it on the device with to_device, and copy_ it into the first `bucket` rows of buffers.NAME. Of"
            " block_tables, only as many columns as the step has. value is 1 for seq_lens and 0 for the others.",
        ),
    ),
    "9.3": Check(
        cases=graph_cases,
        judge=judge_graphs,
        minutes=15,
        difficulty=2,
        hints=(
            "Four lines for each bucket: the buffers' first rows; a call that warms up; a new graph; the same call inside"
            " `with graph.capture():`. What must be kept of it, so that replay() can run it and find the result?",
            "Before the loop, self.buffers.clear() makes all rows padding, so that recording writes to nobody's slots. The loop"
            " runs over reversed(self.buckets). replay() looks the bucket up, calls graph.replay(), and returns the tensor"
            " that the *recorded* call returned.",
            "self.buffers.clear()\nfor each bucket, the largest first:\n    buffers = self.buffers.first(bucket)\n"
            "    self.decode_step(buffers)\n    graph = self.new_graph()\n    inside graph.capture(): hidden ="
            " self.decode_step(buffers)\n    self.graphs[bucket] = graph, hidden",
        ),
    ),
}
