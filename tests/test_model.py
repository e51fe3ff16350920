"""The model's parts, its counts, its gradients, and its files: what is saved comes back, and what is broken is named."""
import json
import random

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from gptoss_lite.cache import MixedKVCache
from gptoss_lite.config import ModelConfig, count_parameters, gptoss_502m, gptoss_tiny
from gptoss_lite.generation import generate, prefill
from gptoss_lite.model import GPTOSS, MoELayer, RMSNorm, balancing_loss, load_checkpoint, read_checkpoint, save_checkpoint
from oracle import SIZES, cases, config, dense_logits, examples, random_ids, random_model, rms_norm, swiglu, worst

# ---- counts and names ------------------------------------------------------------------------------------------

def test_counts_of_the_default():
    with torch.device("meta"): model = GPTOSS(gptoss_502m())
    assert model.num_parameters() == count_parameters(gptoss_502m()) == 501_836_640
    assert model.num_active_parameters() == count_parameters(gptoss_502m(), active=True) == 247_032_672

@pytest.mark.parametrize("change", [{}, dict(weight_tying=False), dict(sink_bias=False), dict(n_shared_experts=0), dict(n_shared_experts=3),
                                    dict(n_activated_experts=1), dict(n_activated_experts=5), dict(n_layers=1), SIZES[3]], ids=str)
def test_counts(change):
    cfg = config(**change)
    model = GPTOSS(cfg)
    assert model.num_parameters() == count_parameters(cfg) == sum({id(p): p.numel() for p in model.parameters()}.values())
    touched = model.num_parameters() - cfg.n_layers*(cfg.n_routed_experts - cfg.n_activated_experts)*3*cfg.d_model*cfg.ffn_dim
    assert model.num_active_parameters() == count_parameters(cfg, active=True) == touched

def names(cfg):
    yield from ("embed.weight", "norm.weight", "head.weight")
    for i in range(cfg.n_layers):
        b = f"blocks.{i}."
        for n in ("norm1", "attn.q_proj", "attn.kv_proj", "attn.o_proj", "norm2", "moe.router.gate"): yield f"{b}{n}.weight"
        if cfg.sink_bias: yield f"{b}attn.sink_bias"
        for kind, n in (("experts", cfg.n_routed_experts), ("shared_experts", cfg.n_shared_experts)):
            for e in range(n):
                for w in ("w1", "w2", "w3"): yield f"{b}moe.{kind}.{e}.{w}.weight"

@pytest.mark.parametrize("change", [{}, dict(sink_bias=False), dict(n_shared_experts=2, weight_tying=False)], ids=str)
def test_state_dict_names(change):
    cfg = config(**change)
    state = GPTOSS(cfg).state_dict()
    assert sorted(state) == sorted(names(cfg))
    C, D, H, Hkv, F = cfg.d_model, cfg.head_dim, cfg.n_heads, cfg.n_kv_heads, cfg.ffn_dim
    shapes = {"attn.q_proj.weight": (H*D, C), "attn.kv_proj.weight": (2*Hkv*D, C), "attn.o_proj.weight": (C, H*D), "norm2.weight": (C,),
              "moe.router.gate.weight": (cfg.n_routed_experts, C), "moe.experts.4.w1.weight": (F, C), "moe.experts.0.w2.weight": (C, F)}
    for n, shape in shapes.items(): assert state[f"blocks.1.{n}"].shape == shape, n
    if cfg.sink_bias: assert state["blocks.2.attn.sink_bias"].shape == (H,)

def test_attributes_of_a_layer():
    cfg = config()
    a, b = (x.attn for x in GPTOSS(cfg).blocks[:2])
    assert (a.is_windowed, b.is_windowed) == (True, False)
    assert (a.window_size, a.n_heads, a.n_kv_heads, a.n_rep, a.head_dim) == (3, 6, 2, 3, 8)
    assert a.yarn.inv_freq.shape == (4,)

def test_fresh_weights():
    torch.manual_seed(0)
    model = GPTOSS(config(init_std=0.05, weight_tying=False, d_model=64, ffn_dim=100, vocab_size=500))
    for n, p in model.named_parameters():
        if "norm" in n: assert (p == 1).all()
        elif "sink" in n: assert (p == 0).all()
        else: assert p.std().item() == pytest.approx(0.05, rel=0.15) and abs(p.mean().item()) < 0.01
    assert GPTOSS(config()).head.weight is not None and GPTOSS(config()).blocks[0].attn.sink_bias.requires_grad

def test_tying():
    model = GPTOSS(config())
    assert model.head.weight is model.embed.weight
    assert GPTOSS(config(weight_tying=False)).head.weight.data_ptr() != GPTOSS(config(weight_tying=False)).embed.weight.data_ptr()

@pytest.mark.parametrize("bad", [None, {}, dict(n_layers=3)])
def test_a_configuration_is_needed(bad):
    with pytest.raises(TypeError, match="cfg.*ModelConfig"): GPTOSS(bad)

# ---- parts -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype,tol", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)], ids=str)
def test_rms_norm(dtype, tol):
    "In float32 or wider: squares of 300 are beyond float16"
    norm = RMSNorm(7, 1e-5).to(dtype)
    with torch.no_grad(): norm.weight.copy_(torch.linspace(0.5, 2, 7))
    x = (300*torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(1))).to(dtype)
    y = norm(x)
    assert y.dtype == dtype and worst(y, rms_norm(x.double(), norm.weight.double(), 1e-5)) < 5*tol
    assert (norm(torch.zeros(1, 7, dtype=dtype)) == 0).all()

def dense_moe(layer, x, A):
    p = (x @ layer.router.gate.weight.T).softmax(-1)
    top = p.topk(A, -1)
    w = torch.zeros_like(p).scatter(-1, top.indices, top.values / top.values.sum(-1, keepdim=True))
    sd = layer.state_dict()
    run = lambda kind, e: swiglu(x, *(sd[f"{kind}.{e}.w{i}.weight"] for i in (1, 2, 3)))
    return (sum(w[..., e, None]*run("experts", e) for e in range(len(layer.experts)))
            + sum(run("shared_experts", s) for s in range(len(layer.shared_experts))))

@examples(30)
@given(N=st.integers(1, 9), B=st.integers(1, 3), E=st.integers(1, 6), shared=st.integers(0, 2), data=st.data(), seed=st.integers(0, 99))
def test_experts(N, B, E, shared, data, seed):
    A = data.draw(st.integers(1, E))
    cfg = config(n_routed_experts=E, n_activated_experts=A, n_shared_experts=shared)
    layer = random_model(cfg, seed).blocks[0].moe
    x = torch.randn(B, N, cfg.d_model, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    y, aux = layer(x)
    assert y.shape == x.shape and worst(y, dense_moe(layer, x, A)) < 1e-10 and aux.shape == ()
    for b in range(B):  # a token's output is its own affair: no neighbour takes its place at an expert
        for t in range(N): assert worst(layer(x[b:b+1, t:t+1])[0], y[b:b+1, t:t+1]) < 1e-10

def gate_to(layer, first):
    "A gate that sends every token with a positive first number to the experts `first`"
    with torch.no_grad():
        layer.router.gate.weight.zero_()
        for n, e in enumerate(first): layer.router.gate.weight[e, 0] = 50. - n

def test_experts_without_tokens():
    cfg = config(n_activated_experts=2)
    layer = random_model(cfg).blocks[0].moe.requires_grad_()
    gate_to(layer, [3, 1])
    x = torch.randn(2, 4, cfg.d_model, generator=torch.Generator().manual_seed(1), dtype=torch.float64).abs()
    y, aux = layer(x)
    assert worst(y, dense_moe(layer, x, 2)) < 1e-10
    (y.sum() + aux).backward()
    for e, grad in enumerate(layer.experts.w13.grad): assert (grad.abs().max() > 0) == (e in (3, 1))

def test_balancing_loss():
    E, N = 6, 30
    even = torch.arange(N)[:, None] % E
    flat = torch.full((N, E), 1/E)
    assert balancing_loss(even, flat).item() == pytest.approx(1)
    assert balancing_loss(torch.zeros(N, 1).long(), flat).item() == pytest.approx(1)  # a uniform router, whatever ties do
    assert balancing_loss(torch.zeros(N, 1).long(), torch.eye(E)[torch.zeros(N).long()]).item() == pytest.approx(E)
    assert balancing_loss(torch.tensor([[0, 1]]*N), torch.tensor([[.5, .5, 0, 0, 0, 0]]*N)).item() == pytest.approx(E/2)
    p = torch.randn(N, E, generator=torch.Generator().manual_seed(2), dtype=torch.float64).softmax(-1)
    top = p.topk(2).indices
    right = E*sum((top == e).sum().item()/(2*N) * p[:, e].mean().item() for e in range(E))
    assert balancing_loss(top, p).item() == pytest.approx(right)

def test_balancing_loss_of_a_model():
    "1 for a uniform router, the mean over layers, and its gradient pushes away from the crowded expert"
    model = random_model(config(n_activated_experts=1))
    with torch.no_grad():
        for b in model.blocks: b.moe.router.gate.weight.zero_()
    assert model(random_ids(model.cfg, 2, 9))[1].item() == pytest.approx(1)
    with torch.no_grad():
        model.blocks[1].moe.router.gate.weight[2] = 1e3*model.blocks[1].norm2.weight.sign()
    each = [b.moe(b.norm2(torch.ones(1, 4, model.cfg.d_model).double()))[1].item() for b in model.blocks]
    assert each[0] == pytest.approx(1) and each[1] == pytest.approx(5)
    crowded = random_model(config(n_activated_experts=1)).blocks[0].moe.requires_grad_()
    with torch.no_grad(): crowded.router.gate.weight.mul_(0.01), crowded.router.gate.weight[2].add_(0.3)
    x = torch.rand(1, 50, 20, generator=torch.Generator().manual_seed(1)).double()
    before = crowded(x)[1]
    before.backward()
    with torch.no_grad(): crowded.router.gate.weight.sub_(crowded.router.gate.weight.grad*0.1)
    assert crowded(x)[1] < before

# ---- number types ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_dtypes(dtype):
    "Residuals, keys and values keep the model's type; logits and the balancing loss are float32 or wider"
    cfg = config(n_activated_experts=2)
    model, ids, wide = random_model(cfg, dtype=dtype), random_ids(cfg, 2, 9), torch.promote_types(dtype, torch.float32)
    seen = []
    for b in model.blocks:
        for m in (b, b.attn, b.moe, b.norm1, b.norm2, b.moe.shared_experts):
            m.register_forward_hook(lambda m, args, out: seen.append((out[0] if isinstance(out, tuple) else out).dtype))
    logits, aux = model(ids)
    cache = MixedKVCache()
    with torch.no_grad(): last = prefill(model, ids, cache, chunk=4)
    assert set(seen) == {dtype} and logits.dtype == last.dtype == wide and aux.dtype == wide
    assert {x.dtype for kv in cache.windowed_kv + cache.global_kv if kv for x in kv[:2]} == {dtype}
    assert cache.used_nbytes == 2*2*cfg.n_kv_heads*cfg.head_dim*dtype.itemsize*(3 + 9 + 3)
    assert model.blocks[0].moe.router(torch.randn(4, cfg.d_model).to(dtype))[2].dtype == wide

# ---- gradients -------------------------------------------------------------------------------------------------

def gradients(model, ids):
    model.zero_grad()
    logits, aux = model(ids)
    (logits.square().mean() + aux).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

@pytest.mark.parametrize("every", [1, 2, 3, 4, 9])
def test_gradient_checkpointing(every):
    "Equal gradients; blocks run twice, the last of nothing thrice; and nothing is run twice without gradients"
    cfg = config(n_layers=4)
    model, ids = random_model(cfg, 1).requires_grad_(), random_ids(cfg, 2, 9)
    right = gradients(model, ids)
    runs = []
    for b in model.blocks: b.register_forward_pre_hook(lambda m, args: runs.append(m))
    model.enable_gradient_checkpointing(every)
    got = gradients(model, ids)
    assert len(runs) == 8
    assert got.keys() == right.keys() and all(worst(got[n], right[n]) < 1e-12 for n in right)
    runs.clear()
    with torch.no_grad(): model(ids)
    generate(model, ids, 1, 0)
    assert len(runs) == 8 and worst(model(ids)[0], dense_logits(model, ids)) < 1e-9

@pytest.mark.parametrize("every,exc", [(0, ValueError), (-1, ValueError), (2.5, TypeError), (True, TypeError), (None, TypeError)])
def test_gradient_checkpointing_refuses(every, exc):
    with pytest.raises(exc, match="every"): GPTOSS(config()).enable_gradient_checkpointing(every)

def test_gradients_by_differences():
    "A few numbers of each tensor, moved a little: the loss moves as the gradient says"
    cfg = config(n_activated_experts=5)  # all of them, so that no choice jumps
    model, ids = random_model(cfg, 4), random_ids(cfg, 1, 7)
    with torch.no_grad():
        for b in model.blocks: b.attn.sink_bias.clamp_(-2, 2)
    model.requires_grad_()
    grads, r = gradients(model, ids), random.Random(0)
    loss = lambda: sum(x for x in (lambda l, a: (l.square().mean(), a))(*model(ids))).item()
    with torch.no_grad():
        for n, p in model.named_parameters():
            i, h = r.randrange(p.numel()), 1e-5
            flat = p.view(-1)
            flat[i] += h; up = loss()
            flat[i] -= 2*h; down = loss()
            flat[i] += h
            assert (up - down)/(2*h) == pytest.approx(grads[n].view(-1)[i].item(), rel=1e-4, abs=1e-7), n

# ---- files -----------------------------------------------------------------------------------------------------

@pytest.fixture
def file(tmp_path):
    "A model, its file, and its logits"
    model = random_model(config(n_layers=2), dtype=torch.float32)
    save_checkpoint(model, tmp_path/"m.safetensors")
    return model, tmp_path/"m.safetensors"

def rewrite(path, change, digest=True):
    "The same file with other tensors; without digests it is one that another program wrote"
    with safe_open(path, framework="pt") as f: meta, state = f.metadata(), {n: f.get_tensor(n) for n in f.keys()}
    change(state)
    if not digest: meta = {"config": meta["config"]}
    save_file(state, path, metadata=meta)

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("change", [{}, dict(weight_tying=False), dict(sink_bias=False, rope_global="none", layer_types=["global", "windowed", "global"]),
                                    dict(n_shared_experts=0, yarn_truncate=False)], ids=str)
def test_round_trip(tmp_path, dtype, change):
    cfg = config(**change)
    model, ids, path = random_model(cfg, 1, dtype), random_ids(cfg, 2, 9), tmp_path/"m.safetensors"
    save_checkpoint(model, path)
    got = load_checkpoint(path)
    assert got.cfg == cfg and {n: p.dtype for n, p in got.named_parameters()} == {n: dtype for n, _ in model.named_parameters()}
    assert (got.head.weight is got.embed.weight) == cfg.weight_tying
    for (n, a), (m, b) in zip(sorted(model.state_dict().items()), sorted(got.state_dict().items())): assert n == m and torch.equal(a, b)
    with torch.no_grad(): assert torch.equal(got(ids)[0], model(ids)[0])
    assert torch.equal(generate(got, ids, 5, 0), generate(model, ids, 5, 0))
    assert not any(p.is_meta for p in got.parameters()) and all(p.requires_grad for p in got.parameters())
    got(ids)[0].sum().backward()  # and it trains on
    if dtype != torch.float64: assert got.bfloat16()(ids)[0].isfinite().all()

def test_a_tied_head_is_not_in_the_file(file):
    model, path = file
    state, meta = read_checkpoint(path)
    assert sorted(state) == sorted(set(names(model.cfg)) - {"head.weight"}) and ModelConfig.from_dict(json.loads(meta["config"])) == model.cfg
    got = load_checkpoint(path)
    with torch.no_grad(): got.embed.weight.add_(1)
    assert torch.equal(got.head.weight, model.embed.weight + 1)

def test_metadata_travels(tmp_path, file):
    save_checkpoint(file[0], tmp_path/"x.safetensors", metadata=dict(seed="7", note="änd"))
    meta = read_checkpoint(tmp_path/"x.safetensors")[1]
    assert (meta["seed"], meta["note"]) == ("7", "änd")

def test_saving_replaces_as_a_whole(file, monkeypatch):
    "A save that breaks off leaves the old file, and no half of a new one"
    model, path = file
    old = path.read_bytes()
    def broken(tensors, filename, metadata=None): open(filename, "wb").write(b"half"); raise OSError("disk full")
    monkeypatch.setattr("gptoss_lite.model.save_file", broken)
    with pytest.raises(OSError, match="disk full"): save_checkpoint(model, path)
    assert path.read_bytes() == old and [f.name for f in path.parent.iterdir()] == [path.name]

def test_loading_leaves_random_state(file):
    before = torch.get_rng_state()
    load_checkpoint(file[1])
    assert torch.equal(torch.get_rng_state(), before)

NAME, OTHER = "blocks.1.moe.experts.3.w2.weight", "blocks.0.attn.kv_proj.weight"

def extra(s): s["blocks.9.norm1.weight"] = torch.ones(20)
def misshaped(s): s[OTHER] = s[OTHER].T.contiguous()
def renamed(s): s["blocks.1.moe.expert.3.w2.weight"] = s.pop(NAME)

@pytest.mark.parametrize("digest", [True, False])
@pytest.mark.parametrize("change,words", [
    (lambda s: s.pop(NAME), ["missing", NAME]), (extra, ["unexpected", "blocks.9.norm1.weight"]),
    (misshaped, [OTHER, "(20, 32)", "(32, 20)"]), (renamed, ["missing", NAME, "unexpected", "blocks.1.moe.expert.3.w2.weight"]),
    (lambda s: s.pop("embed.weight"), ["missing", "embed.weight"]), (lambda s: s.clear() or extra(s), ["missing", NAME, OTHER]),
    (lambda s: s.pop("blocks.0.attn.sink_bias"), ["missing", "blocks.0.attn.sink_bias"])],
    ids=["missing", "extra", "misshaped", "renamed", "no embedding", "another file", "no sinks"])
def test_wrong_tensors_are_named(file, change, words, digest):
    rewrite(file[1], change, digest)
    with pytest.raises(ValueError) as e: load_checkpoint(file[1])
    for word in [*words, "m.safetensors", "cfg"]: assert word in str(e.value), (word, str(e.value))

@pytest.mark.parametrize("change,words", [(dict(vocab_size=32), ["embed.weight", "(31, 20)", "(32, 20)"]), (dict(n_layers=3), ["missing", "blocks.2.norm1.weight"]),
                                          (dict(n_layers=1), ["unexpected", "blocks.1.norm1.weight"]), (dict(weight_tying=False), ["missing", "head.weight"]),
                                          (dict(sink_bias=False), ["unexpected", "sink_bias"]), (dict(n_shared_experts=0), ["unexpected", "shared_experts.0.w1"])], ids=str)
def test_a_configuration_that_does_not_fit(file, change, words):
    with pytest.raises(ValueError) as e: load_checkpoint(file[1], file[0].cfg.replace(**change))
    for word in words: assert word in str(e.value), (word, str(e.value))

def test_another_configuration_may_be_given(file):
    "One that the tensors fit: the same weights evaluated with other positions"
    model, path = file
    cfg = model.cfg.replace(yarn_scale_factor=1, window_size=5)
    got, ids = load_checkpoint(path, cfg), random_ids(model.cfg, 2, 9)
    assert got.cfg == cfg and worst(got(ids)[0], dense_logits(got, ids)) < 1e-4 and worst(got(ids)[0], model(ids)[0]) > 1e-2

def test_heads_of_others(file):
    "A file that carries its tied head is fine; another head is not; an untied model takes it"
    model, path = file
    rewrite(path, lambda s: s.update({"head.weight": s["embed.weight"].clone()}), digest=False)
    assert torch.equal(load_checkpoint(path).embed.weight, model.embed.weight)
    for wrong in (lambda s: s["head.weight"].add_(1), lambda s: s.update({"head.weight": s["embed.weight"][:5].clone()})):
        rewrite(path, wrong, digest=False)
        with pytest.raises(ValueError, match="head.weight"): load_checkpoint(path)
    rewrite(path, lambda s: s.update({"head.weight": s["embed.weight"] + 1}), digest=False)
    got = load_checkpoint(path, model.cfg.replace(weight_tying=False))
    assert torch.equal(got.head.weight, model.embed.weight + 1) and torch.equal(got.embed.weight, model.embed.weight)

@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 500, 0.3, 0.9, -9, -1])
def test_truncated_files(file, keep):
    path = file[1]
    data = path.read_bytes()
    path.write_bytes(data[:int(keep*len(data)) if isinstance(keep, float) else keep])
    for read in (load_checkpoint, read_checkpoint):
        with pytest.raises(ValueError, match="m.safetensors"): read(path)

def test_files_of_another_kind(tmp_path):
    for data in (b"not a checkpoint at all", b"\xff"*1000, json.dumps(dict(a=1)).encode()*50):
        (tmp_path/"x.safetensors").write_bytes(data)
        with pytest.raises(ValueError, match="x.safetensors"): load_checkpoint(tmp_path/"x.safetensors")
    with pytest.raises(FileNotFoundError, match="nowhere"): load_checkpoint(tmp_path/"nowhere.safetensors")

def flip(data, bit): return data[:bit//8] + bytes([data[bit//8] ^ (1 << bit % 8)]) + data[bit//8+1:]

def test_any_flipped_bit_of_the_tensors(file):
    path = file[1]
    data = path.read_bytes()
    start, r = 8 + int.from_bytes(data[:8], "little"), random.Random(0)
    for bit in [8*start, 8*len(data) - 1, *(r.randrange(8*start, 8*len(data)) for _ in range(30))]:
        path.write_bytes(flip(data, bit))
        for read in (load_checkpoint, read_checkpoint):
            with pytest.raises(ValueError, match="digest.*damaged"): read(path)

def test_any_flipped_bit_of_the_header(file):
    "Refused, or without any consequence"
    model, path = file
    data = path.read_bytes()
    end, r, harmless = 8 + int.from_bytes(data[:8], "little"), random.Random(1), 0
    for bit in [*range(0, 64, 5), *(r.randrange(64, 8*end) for _ in range(150))]:
        path.write_bytes(flip(data, bit))
        try: got = load_checkpoint(path)
        except ValueError: continue
        harmless += 1
        assert got.cfg == model.cfg and all(torch.equal(a, got.state_dict()[n]) for n, a in model.state_dict().items()), bit
    assert harmless < 10

@pytest.mark.parametrize("name", ["window_size", "n_layers", "yarn_scale_factor", "rms_norm_eps"])
def test_a_configuration_that_was_changed(file, name):
    "One bit makes a window of 3 one of 2: the tensors still fit, but the file is not what was saved"
    path = file[1]
    data = path.read_bytes()
    at = data.index(b'\\"%s\\": ' % name.encode()) + len(name) + 6
    assert chr(data[at]) in "0123456789"
    path.write_bytes(flip(data, 8*at))
    for read in (load_checkpoint, read_checkpoint):
        with pytest.raises(ValueError, match="damaged"): read(path)

def test_files_without_configuration(file):
    model, path = file
    state, _ = read_checkpoint(path)
    save_file(state, path)
    with pytest.raises(ValueError, match="cfg="): load_checkpoint(path)
    assert torch.equal(load_checkpoint(path, model.cfg).norm.weight, model.norm.weight)

def test_the_preset_runs():
    model = GPTOSS(gptoss_tiny())
    logits, aux = model(random_ids(gptoss_tiny(), 2, 20))
    assert logits.shape == (2, 20, 97) and logits.isfinite().all() and 0.5 < aux.item() < 5


def test_positions_must_be_one_for_each_token():
    m = random_model(config())
    ids = random_ids(m.cfg, 2, 9)
    for bad in (torch.tensor([5]), torch.tensor(5), torch.arange(8), torch.arange(18).view(2, 9)):
        with pytest.raises(ValueError, match=r"positions has shape.*must be \(9,\)"): m(ids, bad)
    with pytest.raises(ValueError, match="idx has shape"): m(ids[0])

def test_a_head_that_came_untied_is_not_dropped(tmp_path):
    m = random_model(config())
    m.head.weight = torch.nn.Parameter(torch.randn_like(m.head.weight))
    with pytest.raises(ValueError, match="head.weight is not embed.weight.*weight_tying"): save_checkpoint(m, tmp_path/"m.safetensors")
    assert not list(tmp_path.iterdir())
