"What takes minutes: 131,072 tokens through the shipped checkpoint."
import json
import subprocess
import sys

import pytest

RUN = """
import json, resource, sys
from gptoss_lite import load_pretrained, MixedKVCache, PasskeyEvaluator, generate
from gptoss_lite.memory import kv_cache_bytes
import torch
length = int(sys.argv[1])
model, tokenizer = load_pretrained()
ev = PasskeyEvaluator(model, tokenizer)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
trial = ev.run_trial(length, 0, "04711", 0.5, seed=977)
cache = MixedKVCache()
generate(model, torch.tensor([ev.build_prompt_ids("04711", 4096)]), 1, 0., cache=cache)
print(json.dumps(dict(before=before, peak=peak(), output=trial.output, seconds=trial.seconds,
                      held=cache.used_nbytes, analytic=kv_cache_bytes(model.cfg, 4096, dtype=torch.float32))))
"""


def run_in_a_new_process(length:int)->dict:
    out = subprocess.run([sys.executable, "-c", RUN, str(length)], capture_output=True, text=True, check=True)
    return json.loads(out.stdout)


@pytest.mark.slow
def test_a_prompt_of_131072_tokens_stays_under_2_GiB(record_property):
    r = run_in_a_new_process(131_072)
    print(f"\npeak {r['peak']/2**30:.2f} GiB (import and weights {r['before']/2**30:.2f}), {r['seconds']:.0f} s, answer{r['output']!r}")
    assert r["peak"] < 2 * 2**30
    assert r["held"] == r["analytic"]
