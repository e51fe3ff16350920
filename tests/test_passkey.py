"Passkey prompts, scoring and evaluation: exact lengths, one needle, nothing leaked."
import random, re

import pytest
import torch
from hypothesis import assume, given, strategies as st

from gptoss_lite.config import gptoss_tiny
from gptoss_lite.model import GPTOSS
from gptoss_lite.passkey import (CharTokenizer, PasskeyEvaluator, PromptBuilder, Trial, depth_of, load_pretrained, make_filler_text,
                                 plot_heatmap, summarize, wilson_interval)


@pytest.fixture(scope="module")
def char_ev(): return PasskeyEvaluator(GPTOSS(gptoss_tiny().replace(vocab_size=256)), CharTokenizer())


@pytest.fixture(scope="module")
def bpe():
    "A byte-pair tokenizer of transformers with a start token, trained here"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = [make_filler_text(300, s) + f" The passkey is {random.Random(s).randrange(100_000):05d}." for s in range(20)]
    tok.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"],
                                                       initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tok.token_to_id("<s>"))])
    return PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>")


def check_prompt(ev, tokenizer, key, length, depth, seed):
    ids = ev.build_prompt_ids(key, length, depth, seed)
    assert len(ids) == length and ids == ev.build_prompt_ids(key, length, depth, seed)
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None: assert ids.count(bos) == 1 and ids[0] == bos
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text == ev.build_prompt(key, length, depth, seed).removeprefix("<s>")
    assert re.findall(r"\d+", text) == [key], "the key once, and no other number"
    assert text.endswith(" What is the passkey? The passkey is") and text.count(f" The passkey is {key}.") == 1
    needle = ev.builder.encode(f" The passkey is {key}.")
    tail, start = len(ev.builder.encode(" What is the passkey? The passkey is")), bos is not None
    free = length - len(needle) - tail - start
    at = next(i for i in range(length) if ids[i:i+len(needle)] == needle)
    assert abs(at - start - depth_of(depth)*free) <= 1


@given(key=st.integers(0, 99_999), length=st.integers(80, 3000), depth=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_prompts_of_characters(char_ev, key, length, depth, seed):
    check_prompt(char_ev, char_ev.tokenizer, f"{key:05d}", length, depth, seed)


@given(key=st.integers(0, 99_999), length=st.integers(60, 1000), depth=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_prompts_of_a_trained_byte_pair_tokenizer(bpe, key, length, depth, seed):
    ev = PasskeyEvaluator(GPTOSS(gptoss_tiny().replace(vocab_size=400)), bpe)
    check_prompt(ev, bpe, f"{key:05d}", length, depth, seed)


def test_seed_and_depth_change_the_prompt(char_ev):
    a = char_ev.build_prompt_ids("01234", 500, "middle", 1)
    assert a != char_ev.build_prompt_ids("01234", 500, "middle", 2) and a != char_ev.build_prompt_ids("01234", 500, "end", 1)
    assert a == char_ev.build_prompt_ids(1234, 500, 0.5, 1), "an int keeps its leading zeros"


def test_words_are_whole(char_ev):
    "Filler words are never cut, before the needle or behind it"
    from gptoss_lite.passkey import WORDS
    for length in range(100, 140):
        text = char_ev.build_prompt("55555", length, 0.37, length)
        words = set(re.sub(r"The passkey is \d{5}\.|What is the passkey\? The passkey is", " ", text).split())
        assert words <= set(WORDS)


def test_filler_is_a_function_of_the_seed():
    assert make_filler_text(50, 3) == make_filler_text(50, 3) != make_filler_text(50, 4)
    assert len(make_filler_text(50).split()) == 50 and not re.search(r"\d", make_filler_text(500))


@pytest.mark.parametrize("output, want", [
    (" 12345.", "12345"), ("12345", "12345"), (" 1234567", None), (" 1234", None), ("", None), (" 01234 56789", "01234"),
    (" 123456 54321", "54321"), (" a12345", None), ("x 99999,", "99999")])
def test_scoring(char_ev, output, want): assert char_ev.extract_passkey_from_output(output) == want


def test_only_new_tokens_count(char_ev, monkeypatch):
    "A model that repeats its prompt has not answered"
    import gptoss_lite.passkey as P
    monkeypatch.setattr(P, "generate", lambda model, ids, n, **kw: torch.cat([ids, torch.full((1, n), ord("x"))], 1))
    t = char_ev.run_trial(200, 0, "12345", 0.5, 0)
    assert not t.correct and t.answer is None and t.output == "x"*16
    monkeypatch.setattr(P, "generate", lambda model, ids, n, **kw: torch.cat([ids, torch.tensor([[ord(c) for c in " 12345." + "y"*(n-7)]])], 1))
    assert char_ev.run_trial(200, 0, "12345", 0.5, 0).correct
    assert not char_ev.run_trial(200, 0, "12346", 0.5, 0).correct


def test_plan_varies_key_depth_and_filler(char_ev):
    plan = char_ev.plan([300, 400], 5, "spread", 42)
    assert [p["length"] for p in plan] == [300]*5 + [400]*5
    assert [p["depth"] for p in plan[:5]] == [0, 0.25, 0.5, 0.75, 1]
    assert len({p["key"] for p in plan[:5]}) == len({p["seed"] for p in plan[:5]}) == 5
    assert plan == char_ev.plan([300, 400], 5, "spread", 42) != char_ev.plan([300, 400], 5, "spread", 43)


def test_evaluate_returns_shares_and_an_untrained_model_knows_nothing(char_ev):
    res = char_ev.evaluate([100, 150], n_trials=3, passkey_position="spread")
    assert res == {100: 0., 150: 0.} and len(char_ev.trials) == 6
    assert [(r["length"], r["hits"], r["trials"]) for r in summarize(char_ev.trials)] == [(100, 0, 3), (150, 0, 3)]


def test_heatmap_shows_each_cell():
    trials = [Trial(n, i, "1"*5, d, 0, "", None, n + d < 200.5, 0.) for n in (100, 200) for i, d in enumerate((0., 0.5, 1.))]
    ax = plot_heatmap(trials)
    assert [t.get_text() for t in ax.texts] == ["100%", "100%", "100%", "0%", "100%", "0%"]


@pytest.mark.parametrize("bad", ["1234", "123456", "1234a", 123456, -1, None, True, 1.5, "１２３４５"])
def test_bad_keys(char_ev, bad):
    with pytest.raises(ValueError, match="passkey=.*five digits"): char_ev.build_prompt_ids(bad, 200)


@pytest.mark.parametrize("bad", ["top", -0.1, 1.1, float("nan"), None])
def test_bad_positions(char_ev, bad):
    with pytest.raises(ValueError, match="passkey_position="): char_ev.build_prompt_ids("12345", 200, bad)


@pytest.mark.parametrize("length", [0, 1, 40])
def test_too_short_a_context_says_what_it_takes(char_ev, length):
    with pytest.raises(ValueError, match="context_length=.*at least 58"): char_ev.build_prompt_ids("12345", length)


def test_the_shortest_context_is_needle_and_question(char_ev):
    assert char_ev.build_prompt("12345", 58) == " The passkey is 12345. What is the passkey? The passkey is"


def test_a_tokenizer_without_a_single_blank_is_refused():
    class Twice(CharTokenizer):
        def encode(self, text, add_special_tokens=False): return [x for i in super().encode(text) for x in (i, i)]
    with pytest.raises(ValueError, match="tokenizer Twice.*one token"): PromptBuilder(Twice())


def test_wilson():
    lo, hi = wilson_interval(85, 100)
    assert (round(lo, 3), round(hi, 3)) == (0.767, 0.907)  # the specification's case
    assert wilson_interval(0, 7)[0] == 0 and wilson_interval(7, 7)[1] == pytest.approx(1)
    assert wilson_interval(100, 100)[0] == pytest.approx(100/(100 + 3.8415), abs=1e-4)
    assert wilson_interval(0, 0) == (0, 1)


def test_unknown_pretrained_name():
    with pytest.raises(ValueError, match="name='nope'"): load_pretrained("nope")
