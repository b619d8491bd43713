# expect: Is a `return` missing?
def wasted_slots(lengths, batch_size):
    wasted = 0
    for start in range(0, len(lengths), batch_size):
        batch = lengths[start : start + batch_size]
        wasted += max(batch) * len(batch) - sum(batch)
