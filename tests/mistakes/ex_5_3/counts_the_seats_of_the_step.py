# expect: running already, and max_num_seqs is 2
import minivllm.core.scheduler
from minivllm.core.request import RequestStatus


class Scheduler(minivllm.core.scheduler.Scheduler):
    capabilities = frozenset({"stops", "whole prompts", "preemption", "priority"})

    def schedule(self):
        step = self.open_step()
        while self.waiting and len(step.num_scheduled_tokens) < self.max_num_seqs:
            request = self.waiting.peek()
            n = request.num_tokens
            if n > self.budget_left(step) or not self.admit(step, request, n):
                break
        if step.num_scheduled_tokens:
            return self.close_step(step)
        for request in self.running_in_order():
            if not self.advance(step, request, 1):
                break
        return self.close_step(step)
