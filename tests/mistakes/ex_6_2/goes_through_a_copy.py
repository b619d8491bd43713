# expect: pass over it
import minivllm.core.scheduler


class Scheduler(minivllm.core.scheduler.Scheduler):
    def schedule(self):
        step = self.open_step()
        for request in list(self.running):
            n = self.num_new_tokens(request, self.budget_left(step))
            if n > 0 and not self.advance(step, request, n):
                break
        while (request := self.next_in_line()) is not None:
            hits, num_cached_tokens = self.kv_cache_manager.get_computed_blocks(request)
            n = self.num_new_tokens(request, self.budget_left(step), num_cached_tokens)
            if n == 0 or not self.admit(step, request, n, hits, num_cached_tokens):
                break
        return self.close_step(step)
