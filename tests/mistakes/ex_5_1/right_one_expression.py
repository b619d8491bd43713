# expect: passed
def wasted_slots(lengths, batch_size):
    batches = (lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size))
    return sum(max(b) * len(b) for b in batches) - sum(lengths)
