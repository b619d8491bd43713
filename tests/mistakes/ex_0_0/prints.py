# expect: print only shows it
def double(x):
    print(2 * x)
