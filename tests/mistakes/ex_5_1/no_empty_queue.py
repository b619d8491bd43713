# expect: ValueError
def wasted_slots(lengths, batch_size):
    longest = max(lengths)
    batches = [lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size)]
    return sum(min(longest, max(batch)) * len(batch) - sum(batch) for batch in batches)
