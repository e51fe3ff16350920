"""A long run of a small model: decode, and every so often go back, fork and fail. `python tests/soak.py results/soak.json`
writes the resident memory every hundred steps; `06a_operate` draws it."""
import json
import platform
import sys
from datetime import date
from pathlib import Path

import torch

from gptoss_lite.cache import MixedKVCache
from gptoss_lite.config import gptoss_tiny
from gptoss_lite.generation import forward_step
from gptoss_lite.model import GPTOSS

def resident()->int: # bytes
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

@torch.no_grad()
def soak(steps:int, every:int=100)->dict:
    "`steps` tokens one by one, a thousand after the same prompt each time; between them each way to go back, without a trace in logits or memory"
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cfg = gptoss_tiny()
    model, sinks = GPTOSS(cfg).eval().requires_grad_(False), {}
    cache, prompt, turn = MixedKVCache(rewind=8), torch.randint(cfg.vocab_size, (1, 300)), 1000
    feed = lambda c, x: forward_step(model, x, c.n_tokens, c, sinks)
    rows, counts, mark, fork = [], dict(turns=0, snapshots=0, restores=0, rewinds=0, forks=0, failures=0), None, None
    feed(cache, prompt)
    start = cache.snapshot()
    for step in range(steps):
        t = step % turn
        if t == 0: # the next turn begins behind the prompt
            cache.restore(start)
            ids, mark = torch.cat([prompt, torch.randint(cfg.vocab_size, (1, turn + 16))], 1), None
            counts["turns"] += 1
        n = cache.n_tokens
        with cache.step(): feed(cache, ids[:, n:n+1])
        if t % 3 == 0: # a draft of up to eight tokens that is not accepted
            feed(cache, ids[:, :1 + t % 8])
            cache.rewind(1 + t % 8)
            counts["rewinds"] += 1
        if t % 5 == 0:
            mark = cache.snapshot() # the one before is dropped
            counts["snapshots"] += 1
        if t % 10 == 9 and mark is not None: # back by four tokens, and again what came after them
            cache.restore(mark)
            feed(cache, ids[:, cache.n_tokens:n+1])
            counts["restores"] += 1
        if t % 25 == 0: # another continuation, that lives until the next one comes
            fork = cache.fork()
            feed(fork, ids[:, :1])
            feed(fork, ids[:, 1:4])
            counts["forks"] += 1
        if t % 7 == 0:
            try:
                with cache.step():
                    feed(cache, ids[:, :2])
                    raise KeyboardInterrupt
            except KeyboardInterrupt: counts["failures"] += 1
        if (step + 1) % every == 0: rows.append([step + 1, resident()])
    n = cache.n_tokens
    assert n == 300 + t + 1
    last = model.logits(feed(cache, ids[:, n:n+1])[:, -1:])
    x = feed(MixedKVCache(), ids[:, :n+1]) # the last turn, read at once
    return dict(steps=steps, rows=rows, counts=counts, used_nbytes=cache.used_nbytes, nbytes=cache.nbytes, mark_nbytes=start.nbytes,
                worst=(model.logits(x[:, -1:]) - last).abs().max().item(), machine=platform.machine(), date=str(date.today()))

if __name__ == "__main__":
    result = soak(int(sys.argv[2]) if len(sys.argv) > 2 else 20_000)
    Path(sys.argv[1]).write_text(json.dumps(result) + "\n")
    first, last = (next(b for t, b in result["rows"] if t >= n) for n in (result["steps"]//10, result["steps"]))
    print(f"{result['steps']} steps, {result['counts']}: {first/2**20:.1f} MiB after a tenth, {last/2**20:.1f} MiB in the end; logits differ by {result['worst']:.1e}")
