# expect: should return 1.0
def double(x):
    return 2 * int(x)
