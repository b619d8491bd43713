# expect: passed
import minivllm.core.scheduler


class Scheduler(minivllm.core.scheduler.Scheduler):
    capabilities = {"stops", "whole prompts", "preemption", "priority"}

    def schedule(self):
        step = self.open_step()
        self.take_prompts(step, self.max_num_batched_tokens)
        if step.total_num_scheduled_tokens == 0:
            self.take_decodes(step)
        self.close_step(step)
        return step

    def take_prompts(self, step, budget):
        while True:
            request = self.next_in_line()
            if request is None or request.num_tokens > budget:
                return
            if not self.can_admit(request, []):
                return
            self.admit(step, request, request.num_tokens)
            budget = budget - request.num_tokens

    def take_decodes(self, step):
        for request in tuple(self.running):
            if request in self.running:
                if self.advance(step, request, 1) is False:
                    return
