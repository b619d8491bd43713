# expect: Those are all slots|hold a token. The others
def wasted_slots(lengths, batch_size):
    return sum(lengths)
