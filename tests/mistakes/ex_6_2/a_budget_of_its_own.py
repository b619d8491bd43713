# expect: its tokens are free again
import minivllm.core.scheduler


class Scheduler(minivllm.core.scheduler.Scheduler):
    def schedule(self):
        step = self.open_step()
        budget = self.max_num_batched_tokens
        for request in self.running_in_order():
            n = self.num_new_tokens(request, budget)
            if n == 0:
                continue
            if not self.advance(step, request, n):
                break
            budget -= n
        while (request := self.next_in_line()) is not None:
            hits, num_cached_tokens = self.kv_cache_manager.get_computed_blocks(request)
            n = self.num_new_tokens(request, budget, num_cached_tokens)
            if n == 0 or not self.admit(step, request, n, hits, num_cached_tokens):
                break
            budget -= n
        return self.close_step(step)
