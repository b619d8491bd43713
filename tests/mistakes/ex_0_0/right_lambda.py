# expect: passed
double = lambda x: x * 2
