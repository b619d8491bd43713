# expect: should return the number 4
def double(x):
    return str(2 * x)
