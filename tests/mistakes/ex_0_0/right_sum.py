# expect: passed
def double(x):
    return x + x
