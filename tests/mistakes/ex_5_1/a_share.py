# expect: That is a share
def wasted_slots(lengths, batch_size):
    batches = [lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size)]
    slots = sum(max(batch) * len(batch) for batch in batches)
    return (slots - sum(lengths)) / slots if slots else 0
