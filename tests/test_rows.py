"""A few rows against a matrix: `linear` is `F.linear` for whatever comes in, and reads in slabs where it should.

**The bound.** In whatever order C products are added, the sum is within γ·Σ|x||w| of the true one, γ = Cu/(1 - Cu) with
u the unit roundoff; so two ways to compute it are within twice that of each other.
"""
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import event, given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import gptoss_lite.rows as rows
from gptoss_lite.cache import MixedKVCache
from gptoss_lite.generation import forward_step
from gptoss_lite.rows import FEW_ROWS, MIN_NUMEL, SLABS, Linear, column_slabs, linear, n_slabs, row_slabs, slab_linear
from oracle import config, examples, random_ids, random_model

MKL = torch.backends.mkl.is_available()  # elsewhere a batch is a loop, and nothing is cut

class Made(TorchDispatchMode):
    "The operations that make new storage, and the shape of what each makes"
    def __init__(self):
        super().__init__()
        self.ops = []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.returns[0].alias_info is None: self.ops.append((func.overloadpacket.__name__, tuple(out.shape)))
        return out

def made(job):
    with Made() as m: job()
    return m.ops

def in_slabs(x, weight):
    "Whether `linear` makes one batch of slabs; a batch over an axis of x, as `F.linear` may make, has another shape"
    n, S = math.prod(x.shape[:-1]), math.gcd(len(weight), 64)
    ops = made(lambda: linear(x, weight))
    taken = [shape for name, shape in ops if name == "bmm"]
    if S == 1 or not {(S, n, len(weight)//S), (S, len(weight)//S, n)} & set(taken): return False
    columns = x.nbytes < rows.COLUMN_NBYTES
    assert taken == [(S, len(weight)//S, n) if columns else (S, n, len(weight)//S)]
    return True

def normal(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)

def allowed(x, weight, dtype):
    C, u = weight.shape[1], torch.finfo(dtype).eps/2
    return 2*C*u/(1 - C*u) * (x.double().abs() @ weight.double().abs().T)

# ---- the same numbers ------------------------------------------------------------------------------------------

LAYOUTS = {"plain": lambda x: x.contiguous(),
           "transposed": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x,
           "every second": lambda x: torch.stack([x, x + 1], -1)[..., 0],
           "within a larger one": lambda x: F.pad(x, (2, 3), value=torch.nan)[..., 2:2 + x.shape[-1]]}

def spread(x, layout):
    y = LAYOUTS[layout](x)
    assert torch.equal(x, y)
    return y

@examples(300)
@given(st.data(), st.integers(0, 9999), st.sampled_from([torch.float64, torch.float32]))
def test_linear_is_linear(data, seed, dtype):
    "Any shape of x, any R and C, any strides: the result of `F.linear`, and the way that the rules say"
    R = data.draw(st.sampled_from([64, 1, 2, 6, 7, 24, 96, 97, 128, 320]) | st.integers(1, 300))
    C = data.draw(st.sampled_from([1, 3, 5, 64]) | st.integers(0, 100))
    lead = data.draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 9, 0]), max_size=3))
    layouts = st.sampled_from(sorted(LAYOUTS))
    x = spread(normal(*lead, C, dtype=dtype, seed=seed), data.draw(layouts))
    weight = spread(normal(R, C, dtype=dtype, seed=seed + 1), data.draw(layouts))
    n = math.prod(lead)
    cut = MKL and 1 <= n <= 8 and R % 2 == 0
    event(f"in slabs: {cut}, more than one row: {n > 1}")
    with pytest.MonkeyPatch.context() as mp, torch.no_grad():
        mp.setattr(rows, "MIN_NUMEL", 0)
        mp.setattr(rows, "COLUMN_NBYTES", data.draw(st.sampled_from([0, 500, 2**14])))
        got = linear(x, weight)
        assert in_slabs(x, weight) == cut
    want = F.linear(x, weight)
    assert got.dtype == dtype and got.shape == want.shape and got.is_contiguous()
    assert ((got - want).double().abs() <= allowed(x, weight, dtype)).all()
    if n and C: # the bound would see a number of x that is left out
        less = x.clone()
        less[..., 0] += 1
        assert ((F.linear(less, weight) - want).double().abs() > allowed(x, weight, dtype)).any()

@examples(100)
@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 7), st.integers(1, 5), st.integers(0, 9999))
def test_any_number_of_slabs(S, r, C, n, seed):
    x, weight = normal(n, C, seed=seed), normal(S*r, C, seed=seed + 1)
    for f in (slab_linear, row_slabs, column_slabs):
        assert ((f(x, weight, S) - F.linear(x, weight)).abs() <= allowed(x, weight, torch.float64)).all()

@examples(100)
@given(st.integers(0, 10**6))
def test_n_slabs(R):
    assert n_slabs(R) == max(d for d in (1, 2, 4, 8, 16, 32, 64) if R % d == 0) and n_slabs(R) <= SLABS

# ---- the way that it goes --------------------------------------------------------------------------------------

def pair(n=1, R=1024, C=64, dtype=torch.float32):
    return normal(n, C, dtype=dtype, seed=1), normal(R, C, dtype=dtype, seed=2)

@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_slabs_are_taken(grad):
    assert 1024*64 == MIN_NUMEL
    with grad():
        for n in range(1, FEW_ROWS + 1):
            for dtype in (torch.float32, torch.float64):
                x, weight = pair(n, dtype=dtype)
                assert in_slabs(x, weight) == MKL
                assert in_slabs(x.view(n, 1, 64), weight) == MKL
        assert in_slabs(x[0], weight) == MKL

PLAIN = {"no row": dict(n=0), "many rows": dict(n=FEW_ROWS + 1), "a small matrix": dict(R=1022),
         "an odd matrix": dict(R=1025), "bfloat16": dict(dtype=torch.bfloat16), "float16": dict(dtype=torch.float16),
         "complex": dict(dtype=torch.complex64)}

@torch.no_grad()
@pytest.mark.parametrize("case", PLAIN)
def test_plain_is_taken(case):
    x, weight = pair(**PLAIN[case])
    assert "bmm" not in dict(made(lambda: linear(x, weight)))
    assert torch.equal(linear(x, weight), F.linear(x, weight))

@torch.no_grad()
def test_plain_without_mkl(monkeypatch):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not in_slabs(*pair())

@torch.no_grad()
def test_plain_on_other_devices():
    x, weight = pair()
    assert not in_slabs(x.to("meta"), weight.to("meta"))

def test_autocast_rounds_a_parameter_once():
    "Autocast keeps the rounded copy of a parameter, not of a view of it"
    layer, (x, _) = Linear(64, 1024), pair()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ops = made(lambda: [layer(x) for _ in range(3)])
        assert ops.count(("_to_copy", (1024, 64))) == 1
        assert "bmm" not in dict(ops) and layer(x).dtype == torch.bfloat16

@pytest.mark.parametrize("layout", ["plain", "transposed", "within a larger one"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("columns", [0, 2**14])
@torch.no_grad()
def test_the_matrix_is_not_copied(layout, n, columns, monkeypatch):
    """Neither by an operation nor inside the product: what is allocated is the results, twice if they have to be
    swapped, and once an x that lies otherwise"""
    monkeypatch.setattr(rows, "COLUMN_NBYTES", columns)
    x, weight = pair(n)
    weight = spread(weight, layout)
    for x, copy in ((x, 0), (spread(x, "every second"), x.nbytes)):
        with torch.profiler.profile(profile_memory=True) as prof: linear(x, weight)
        assert sum(max(e.self_cpu_memory_usage, 0) for e in prof.events()) <= 2*n*1024*4 + copy
    assert weight.unflatten(0, (64, -1)).data_ptr() == weight.data_ptr()

# ---- gradients -------------------------------------------------------------------------------------------------

def test_gradients_flow():
    x, weight = (t.requires_grad_() for t in pair(2, dtype=torch.float64))
    assert not in_slabs(x, weight)
    out = normal(2, 1024, seed=3)
    linear(x, weight).backward(out)
    torch.testing.assert_close(x.grad, out @ weight.detach(), rtol=0, atol=1e-11)
    torch.testing.assert_close(weight.grad, out.T @ x.detach(), rtol=0, atol=1e-11)

def test_the_layer():
    layer, plain = Linear(64, 1024), torch.nn.Linear(64, 1024, bias=False)
    plain.load_state_dict(layer.state_dict())
    x, _ = pair(3)
    with torch.no_grad():
        assert ((layer(x) - plain(x)).double().abs() <= allowed(x, plain.weight, torch.float32)).all()
        assert in_slabs(x, layer.weight) == MKL
    layer(x).sum().backward()
    plain(x).sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)

# ---- refused as by F.linear ------------------------------------------------------------------------------------

REFUSED = {"float32 by float64": lambda: (normal(1, 64, dtype=torch.float32), normal(1024, 64)),
           "float64 by float32": lambda: (normal(1, 64), normal(1024, 64, dtype=torch.float32)),
           "float32 by bfloat16": lambda: (normal(1, 64, dtype=torch.float32), normal(1024, 64, dtype=torch.bfloat16)),
           "integers": lambda: (torch.ones(1, 64, dtype=torch.int64), normal(1024, 64)),
           "half as long": lambda: (normal(2, 32), normal(1024, 64)),
           "twice as long": lambda: (normal(2, 128), normal(1024, 64)),
           "no axis": lambda: (torch.tensor(1.), normal(2**16, 1, dtype=torch.float32)),
           "three axes": lambda: (normal(1, 64), normal(4, 256, 64))}

@torch.no_grad()
@pytest.mark.parametrize("case", REFUSED)
def test_refused_as_by_linear(case):
    x, weight = REFUSED[case]()
    with pytest.raises(RuntimeError) as want: F.linear(x, weight)
    with pytest.raises(RuntimeError) as got: linear(x, weight)
    assert str(got.value) == str(want.value)

# ---- in the model ----------------------------------------------------------------------------------------------

def test_decoding_reads_in_slabs(monkeypatch):
    "With even sizes no product of a decode step is a plain one; a prompt takes it for what all its rows meet"
    monkeypatch.setattr(rows, "MIN_NUMEL", 0)
    calls = {"plain": 0, "slabs": 0}
    def counted(name, f):
        def g(x, *args):
            calls[name] += 1
            return f(x, *args)
        return g
    monkeypatch.setattr(rows, "slab_linear", counted("slabs", rows.slab_linear))
    monkeypatch.setattr(rows.F, "linear", counted("plain", F.linear))
    cfg = config(n_heads=6, n_kv_heads=2, head_dim=8, d_model=20, ffn_dim=14, n_routed_experts=4,
                 n_activated_experts=2, vocab_size=30)
    model, ids, cache = random_model(cfg), random_ids(cfg, 1, 12), MixedKVCache()
    with torch.no_grad():
        model.logits(forward_step(model, ids, 0, cache)[:, -1:])
        assert calls["plain"] > 0
        calls.update(plain=0, slabs=0)
        model.logits(forward_step(model, ids[:, :1], 12, cache))
    assert (calls["plain"], calls["slabs"] > 0) == ((0, True) if MKL else (calls["plain"], False))
