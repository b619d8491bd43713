# expect: It was rounded
def step_time(flops, num_bytes, launches, device):
    time = max(flops / device.flops, num_bytes / device.bandwidth) + launches * device.launch_overhead
    return round(time, 3)
