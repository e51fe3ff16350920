"""Rotary positions against transformers' YaRN, complex numbers, and Python's own arithmetic."""
import math

import pytest
import torch
from hypothesis import given, strategies as st

from gptoss_lite.attention import GPTOSSAttention
from gptoss_lite.config import ModelConfig
from gptoss_lite.rope import YaRNRoPE, apply_rope, yarn_inv_freq, yarn_mscale
from oracle import config, dense_logits, examples, frequencies, random_ids, random_model, rotate, worst

LAST = 131_071
OURS = ModelConfig()
GPT_OSS = ModelConfig(head_dim=64, rope_theta=150_000, yarn_scale_factor=32, yarn_original_max_seq_len=4096, yarn_truncate=False)

# ---- frequencies -----------------------------------------------------------------------------------------------

def transformers_yarn(cfg):
    pytest.importorskip("transformers")
    from transformers import GptOssConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    hf = GptOssConfig(head_dim=cfg.head_dim, max_position_embeddings=cfg.yarn_target_seq_len, rope_parameters=dict(
        rope_type="yarn", rope_theta=float(cfg.rope_theta), factor=float(cfg.yarn_scale_factor),
        beta_fast=float(cfg.yarn_beta_fast), beta_slow=float(cfg.yarn_beta_slow), truncate=cfg.yarn_truncate,
        original_max_position_embeddings=cfg.yarn_original_max_seq_len))
    return ROPE_INIT_FUNCTIONS["yarn"](hf, "cpu")

OTHERS = dict(ours=OURS, untruncated=OURS.replace(yarn_truncate=False), gpt_oss=GPT_OSS, truncated=GPT_OSS.replace(yarn_truncate=True),
              scale_4=OURS.replace(yarn_scale_factor=4, yarn_original_max_seq_len=2048), plain=OURS.replace(yarn_scale_factor=1),
              turns=OURS.replace(yarn_beta_fast=16, yarn_beta_slow=2))

@pytest.mark.parametrize("name", OTHERS)
def test_equals_transformers_yarn(name):
    cfg = OTHERS[name]
    freqs, factor = transformers_yarn(cfg)
    ours = yarn_inv_freq(cfg)
    assert ours.dtype == torch.float64 and ours.shape == (cfg.head_dim//2,)
    assert ((ours - freqs.double()).abs() / ours).max() < 1e-6  # theirs are float32
    assert YaRNRoPE(cfg).mscale == pytest.approx(factor, abs=1e-12)
    if cfg.yarn_scale_factor > 1:  # the comparison sees the rounding of the bounds, and the ramp
        other = yarn_inv_freq(cfg.replace(yarn_truncate=not cfg.yarn_truncate))
        assert ((other - freqs.double()).abs() / ours).max() > 1e-3

def test_the_released_configuration_of_gpt_oss():
    "transformers' defaults for GPT-OSS are θ 150,000, factor 32, 4,096 tokens, no rounding: the attention factor is 1.3466"
    transformers = pytest.importorskip("transformers")
    hf = transformers.GptOssConfig()
    p = hf.rope_parameters
    assert (p["rope_theta"], p["factor"], p["original_max_position_embeddings"], p["truncate"]) == (150_000, 32, 4096, False)
    rope = transformers.models.gpt_oss.modeling_gpt_oss.GptOssRotaryEmbedding(hf)
    assert ((yarn_inv_freq(GPT_OSS) - rope.inv_freq.double()).abs() / yarn_inv_freq(GPT_OSS)).max() < 1e-6
    assert round(yarn_mscale(32), 4) == 1.3466 == round(rope.attention_scaling, 4)

@examples(60)
@given(D=st.sampled_from([2, 6, 16, 96]), theta=st.sampled_from([100, 1e4, 150_000]), scale=st.sampled_from([1, 1.5, 4, 32]),
       L=st.sampled_from([64, 777, 4096]), slow=st.floats(0.25, 4), more=st.floats(0, 40), truncate=st.booleans())
def test_frequencies(D, theta, scale, L, slow, more, truncate):
    cfg = ModelConfig(head_dim=D, rope_theta=theta, yarn_scale_factor=scale, yarn_original_max_seq_len=L, yarn_beta_slow=slow,
                      yarn_beta_fast=slow+more, yarn_truncate=truncate)
    ours, right = yarn_inv_freq(cfg), frequencies(cfg)
    plain = theta ** (-torch.arange(0, D, 2).double() / D)
    assert ours.isfinite().all() and worst(ours/plain, right/plain) < 1e-9
    assert (ours <= plain*(1+1e-12)).all() and (ours >= plain/scale*(1-1e-12)).all()
    assert (ours[1:] < ours[:-1]).all() or D == 2

@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("turns", [1, 3.7, 32])
def test_equal_betas_are_a_step(turns, truncate):
    cfg = OURS.replace(yarn_beta_fast=turns, yarn_beta_slow=turns, yarn_truncate=truncate)
    f, plain = yarn_inv_freq(cfg), OURS.rope_theta ** (-torch.arange(48).double() / 48)
    kept = ((f/plain - 1).abs() < 1e-12).int()
    divided = ((f/plain*32 - 1).abs() < 1e-9).int()
    assert f.isfinite().all() and (kept[1:] <= kept[:-1]).all() and kept[0] == 1 and divided[-1] == 1
    assert (kept + divided).sum() >= 48 - 1  # at most the pair within a rounded bound is blended

def test_mscale():
    assert yarn_mscale(1) == yarn_mscale(0.5) == 1 and yarn_mscale(32) == 0.1*math.log(32) + 1
    assert YaRNRoPE(config(yarn_mscale=False)).mscale == 1 and YaRNRoPE(config(yarn_scale_factor=1)).mscale == 1
    assert YaRNRoPE(config(yarn_scale_factor=8)).mscale == 0.1*math.log(8) + 1

# ---- tables ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("pruned", [0, 24, 48])
@pytest.mark.parametrize("dtype,tol", [(torch.float64, 1e-12), (torch.float32, 2e-7)], ids=str)
@pytest.mark.parametrize("position", [0, 1, 4095, 65_536, LAST])
def test_one_position_equals_the_table(position, dtype, tol, pruned):
    rope = YaRNRoPE(OURS)
    first = max(position - 5, 0)
    table = rope(torch.arange(first, position + 1), pruned, dtype)
    for at in (torch.tensor([position]), torch.tensor(position), torch.tensor([position], dtype=torch.int32)):
        for one, many in zip(rope(at, pruned, dtype), table):
            assert one.dtype == dtype and one.shape == (1, 48) and worst(one[0], many[-1]) <= tol

@pytest.mark.parametrize("cfg", [OURS, GPT_OSS], ids=["ours", "gpt_oss"])
@pytest.mark.parametrize("position", [1, 1000, LAST])
def test_angles_are_float64(cfg, position):
    "Python's own sine and cosine of position times frequency; float32 angles are off by thousandths at the far end"
    rope = YaRNRoPE(cfg)
    for positions in (torch.tensor([position]), torch.tensor([position, 0])):
        cos, sin = rope(positions, 0, torch.float64)
        for i, f in enumerate(rope.inv_freq.tolist()):
            assert cos[0, i].item() == pytest.approx(math.cos(position*f)*rope.mscale, abs=1e-12)
            assert sin[0, i].item() == pytest.approx(math.sin(position*f)*rope.mscale, abs=1e-12)
    if position == LAST:
        single = (torch.tensor(float(position)) * rope.inv_freq.float()).cos()*rope.mscale
        assert worst(single, cos[0]) > 1e-3 and worst(rope(positions)[0][0], cos[0]) < 1e-7

def test_pruned_pairs_do_not_turn():
    "Neither rotated nor scaled, at any position; the others are as if nothing had been pruned"
    rope, at = YaRNRoPE(OURS), torch.tensor([0, 5, LAST])
    whole = rope(at, 0, torch.float64)
    for n in (0, 1, 24, 48):
        cos, sin = rope(at, n, torch.float64)
        assert (cos[:, :n] == 1).all() and (sin[:, :n] == 0).all()
        assert torch.equal(cos[:, n:], whole[0][:, n:]) and torch.equal(sin[:, n:], whole[1][:, n:])
    assert ((whole[0].square() + whole[1].square()).sqrt() - rope.mscale).abs().max() < 1e-12 and rope.mscale > 1.3

def test_which_layers_prune():
    pruned = lambda windowed, **c: GPTOSSAttention(OURS.replace(**c), windowed).n_pruned_dims
    assert pruned(False) == 24 and pruned(True) == 0
    assert pruned(False, yarn_prune_rope_global=False) == 0 and pruned(False, yarn_prune_rope_global=False, rope_global="pruned") == 24
    assert pruned(False, rope_global="full") == 0 and pruned(False, rope_global="none") == 48 and pruned(True, rope_global="none") == 0

def test_no_positions_in_global_layers():
    "With `rope_global='none'` one global layer cannot tell where its keys stand (two could, by what the first one masks)"
    cfg = config(n_layers=1, layer_types=["global"], rope_global="none")
    model, ids = random_model(cfg), random_ids(cfg, 2, 8)
    mixed = torch.cat([ids[:, [4, 2, 0, 5, 1, 6, 3]], ids[:, 7:]], 1)
    assert worst(model(ids)[0][:, -1], model(mixed)[0][:, -1]) < 1e-9
    rotated = random_model(cfg.replace(rope_global="full"))
    assert worst(rotated(ids)[0][:, -1], rotated(mixed)[0][:, -1]) > 1e-2

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.bool], ids=str)
def test_positions_must_be_integers(dtype):
    with pytest.raises(TypeError, match="positions.*integers"): YaRNRoPE(OURS)(torch.ones(3).to(dtype))

# ---- rotation --------------------------------------------------------------------------------------------------

def test_rotation_is_a_complex_product():
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    cos, sin = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert worst(apply_rope(x, cos, sin), rotate(x, torch.complex(cos, sin))) < 1e-12
    y = apply_rope(x.bfloat16(), cos.float(), sin.float())
    assert y.dtype == torch.bfloat16 and worst(y, apply_rope(x, cos, sin)) < 0.05

@pytest.mark.parametrize("far", [0, 7, 1000, 100_000])
def test_scores_see_distances(far):
    "What lets a rotated key be stored: query and key moved by the same distance have the same score"
    rope = YaRNRoPE(OURS)
    q, k = torch.randn(2, 1, 1, 1, 96, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    score = lambda i, j: (apply_rope(q, *rope(torch.tensor([i]), 0, torch.float64)) *
                          apply_rope(k, *rope(torch.tensor([j]), 0, torch.float64))).sum().item()
    assert score(20 + far, 3 + far) == pytest.approx(score(20, 3), abs=1e-9)
    assert abs(score(20 + far, 3 + far) - score(21, 3)) > 1e-3

def test_equals_transformers_half_rotation_after_a_permutation():
    "transformers' GPT-OSS turns the pairs (i, i + D/2): ours once the even places come first"
    hf = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    rope = YaRNRoPE(GPT_OSS)
    cos, sin = rope(torch.arange(100, 109), 0, torch.float64)
    x = torch.randn(2, 3, 9, 64, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    apart = lambda x: torch.cat([x[..., 0::2], x[..., 1::2]], -1)
    assert worst(apart(apply_rope(x, cos, sin)), hf._apply_rotary_emb(apart(x), cos, sin)) < 1e-12
    assert worst(apply_rope(x, cos, sin), hf._apply_rotary_emb(x, cos, sin)) > 0.1  # without it, another rotation

# ---- in a model ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("cast", ["bfloat16", "half", "float"])
def test_casting_a_model_keeps_the_frequencies(cast):
    model = random_model(config())
    before = [b.attn.yarn.inv_freq.clone() for b in model.blocks]
    getattr(model, cast)()
    for f, b in zip(before, model.blocks): assert b.attn.yarn.inv_freq.dtype == torch.float64 and torch.equal(f, b.attn.yarn.inv_freq)

@pytest.mark.parametrize("dtype,table", [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)], ids=str)
def test_tables_are_wide(dtype, table):
    model = random_model(config(), dtype=dtype)
    for cos, sin in model.tables(torch.arange(4)): assert cos.dtype == sin.dtype == table

def test_tables_are_made_once_per_kind():
    model = random_model(config(n_layers=4))
    tables = model.tables(torch.arange(5))
    assert len(tables) == 4 and tables[0][0] is tables[2][0] and tables[1][0] is tables[3][0]
    assert not torch.equal(tables[0][0], tables[1][0])
    for (cos, _), b in zip(tables, model.blocks): assert torch.equal(cos, b.attn.tables(torch.arange(5), torch.float64)[0])

def test_far_positions():
    "At 131,071 a float64 model still agrees with the oracle"
    model, ids = random_model(config()), random_ids(config(), 2, 9)
    at = torch.arange(LAST - 8, LAST + 1)
    assert worst(model(ids, at)[0], dense_logits(model, ids, positions=at)) < 1e-9
