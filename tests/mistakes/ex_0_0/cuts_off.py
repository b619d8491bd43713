# expect: should return 0.5
def double(x):
    return int(2 * x)
