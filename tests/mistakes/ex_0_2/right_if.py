# expect: passed
def step_time(flops, bytes, launches, device):
    compute = flops / device.flops
    memory = bytes / device.bandwidth
    seconds = compute
    if memory > compute:
        seconds = memory
    for _ in range(launches):
        seconds += device.launch_overhead
    return seconds
