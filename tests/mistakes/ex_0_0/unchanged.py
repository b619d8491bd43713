# expect: returned x unchanged
def double(x):
    return x
