# expect: A step holds prompts or decodes
import minivllm.core.scheduler


class Scheduler(minivllm.core.scheduler.Scheduler):
    capabilities = frozenset({"stops", "whole prompts", "preemption", "priority"})

    def schedule(self):
        step = self.open_step()
        for request in self.running_in_order():
            if not self.advance(step, request, 1):
                break
        while (request := self.next_in_line()) is not None:
            n = request.num_tokens
            if n > self.budget_left(step) or not self.admit(step, request, n):
                break
        return self.close_step(step)
