# expect: the square
def double(x):
    return x**2
