# expect: Every row that is shorter
def wasted_slots(lengths, batch_size):
    wasted = 0
    for start in range(0, len(lengths), batch_size):
        batch = lengths[start : start + batch_size]
        wasted += max(batch) - min(batch)
    return wasted
