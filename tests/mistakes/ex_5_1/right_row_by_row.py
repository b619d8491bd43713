# expect: passed
def wasted_slots(lengths, batch_size):
    wasted = 0
    for i, length in enumerate(lengths):
        first = i - i % batch_size
        wasted += max(lengths[first : first + batch_size]) - length
    return wasted
