# expect: arithmetic alone
def step_time(flops, bytes, launches, device):
    return flops / device.flops + launches * device.launch_overhead
