"Passkey prompts, scoring and evaluation: exact lengths, one needle, nothing leaked."
import json, random, re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from gptoss_lite.config import gptoss_tiny
from gptoss_lite.model import GPTOSS
from gptoss_lite.passkey import (HAYSTACKS, NEEDLE, QUESTION, WORDINGS, WORDS, CharTokenizer, PasskeyEvaluator, PromptBuilder, Trial, depth_of,
                                 load_pretrained, load_tokenizer, make_filler_text, plot_heatmap, read_log, summarize, target_at, wilson_interval)
import gptoss_lite.passkey as P


def evaluator(tokenizer, vocab_size, **kw): return PasskeyEvaluator(GPTOSS(gptoss_tiny().replace(vocab_size=vocab_size)), tokenizer, **kw)


@pytest.fixture(scope="module")
def char_ev(): return evaluator(CharTokenizer(), 256)


@pytest.fixture(scope="module")
def bpe_ev():
    "A byte-pair tokenizer of transformers with a start token, trained here on prompts and on runs of blanks"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = [make_filler_text(100, s) + f" The passkey is {random.Random(s).randrange(100_000):05d}." + " "*s for s in range(20)]
    tok.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], show_progress=False,
                                                       initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tok.token_to_id("<s>"))])
    return evaluator(PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>"), 400)


OTHERS = [(h, w) for h in HAYSTACKS for w in WORDINGS if (h, w) != ("words", "passkey")]

@pytest.fixture(scope="module")
def others(char_ev, bpe_ev): # evaluators of every other haystack and wording, for both tokenizers
    return [PasskeyEvaluator(ev.model, ev.tokenizer, haystack=h, wording=w) for ev in (char_ev, bpe_ev) for h, w in OTHERS]


# ---- prompts ----

def check_prompt(ev, key, length, depth, seed):
    ids, tokenizer, w = ev.build_prompt_ids(key, length, depth, seed), ev.tokenizer, WORDINGS[ev.wording]
    assert len(ids) == length and ids == ev.build_prompt_ids(key, length, depth, seed)
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None: assert ids.count(bos) == 1 and ids[0] == bos
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text == ev.build_prompt(key, length, depth, seed).removeprefix("<s>")
    numbers = re.findall(r"\d+", text)
    assert all(len(x) == 5 for x in numbers) and len(set(numbers)) == len(w.names), "one key for each needle, and no other number"
    assert numbers.count(key) == len(numbers) - len(w.names) + 1 == 1 + ("{key}" in w.question), "the key once"
    [asked] = [n for n in w.names if w.needle.format(key=key, name=n) in text]
    question = w.question.format(key=key, name=asked)
    assert text.endswith(question), "the question whole and last"
    needles = re.findall(re.escape(w.needle).replace(r"\{key\}", r"\d{5}").replace(r"\{name\}", r"\w+"), text.removesuffix(question))
    assert len(needles) == len(w.names)
    rest = text.removesuffix(question)
    for n in needles: rest = rest.replace(n, " ")
    assert set(rest.split()) <= set(" ".join(HAYSTACKS[ev.haystack]).split()), "words are whole"
    needle, start = ev.builder.encode(w.needle.format(key=key, name=asked)), int(bos is not None)
    lengths = [len(ev.builder.encode(n)) for n in needles]
    free = length - sum(lengths) - len(ev.builder.encode(question)) - start
    at = next(i for i in range(length) if ids[i:i+len(needle)] == needle)
    before = sum(lengths[:[key in n for n in needles].index(True)])
    assert abs(at - start - before - depth*free) <= 0.5


PROMPTS = dict(key=st.integers(0, 99_999).map("{:05d}".format), length=st.integers(80, 700), depth=st.floats(0, 1), seed=st.integers(0, 2**31))

@settings(max_examples=40)
@given(**PROMPTS)
def test_prompts_of_characters(char_ev, key, length, depth, seed): check_prompt(char_ev, key, length, depth, seed)


@settings(max_examples=25)
@given(**PROMPTS)
def test_prompts_of_a_trained_byte_pair_tokenizer(bpe_ev, key, length, depth, seed): check_prompt(bpe_ev, key, length, depth, seed)


@settings(max_examples=120)
@given(which=st.integers(0, 2*len(OTHERS) - 1), **{**PROMPTS, "length": st.integers(240, 900)})
def test_prompts_of_every_haystack_and_wording(others, which, key, length, depth, seed): check_prompt(others[which], key, length, depth, seed)


def test_no_haystack_and_no_wording_holds_a_digit():
    for units in HAYSTACKS.values(): assert units and not re.search(r"\d", " ".join(units)) and " ".join(units).isascii()
    for w in WORDINGS.values(): assert not re.search(r"\d", w.needle + w.question) and "{key}" in w.needle and len(set(w.names)) == len(w.names)
    assert [n for n, w in WORDINGS.items() if "{key}" in w.question] == ["leaky"]
    for bad in (dict(haystack="hay"), dict(wording="kind"), dict(haystack=None)):
        with pytest.raises(ValueError, match=f"{[*bad][0]}=.*must be one of"): PromptBuilder(CharTokenizer(), **bad)


@pytest.mark.parametrize("which", ["passkey", "several"])
def test_text_before_the_needle_is_the_same_at_every_depth(char_ev, which):
    ev = PasskeyEvaluator(char_ev.model, char_ev.tokenizer, wording=which)
    far, near = (ev.build_prompt_ids("12345", 2000, d, 5) for d in (0.1, 0.9))
    n = P.alike(far, near)
    assert n == next(i for i, (a, b) in enumerate(zip(far, near)) if a != b)
    if which == "passkey": assert abs(n - 0.1*(2000 - 58)) < 10 and near[:n] == ev.build_prompt_ids("54321", 2000, 1., 5)[:n]
    assert P.alike([1, 2], [1, 2, 3]) == 2 and P.alike([], [1]) == 0


@pytest.mark.parametrize("depth", [0., 1.])
def test_every_length_is_met_from_the_shortest_on(char_ev, bpe_ev, depth):
    for length in range(58, 100): check_prompt(char_ev, "00000", length, depth, length)
    for length in range(60, 100): check_prompt(bpe_ev, "90210", length, depth, length)


def test_a_long_prompt_is_met(char_ev): assert len(char_ev.build_prompt_ids("12345", 131_072)) == 131_072


def test_the_shortest_context_is_needle_and_question(char_ev):
    assert char_ev.build_prompt("12345", 58) == NEEDLE.format(key="12345") + QUESTION


def test_seed_and_depth_change_the_prompt(char_ev):
    a = char_ev.build_prompt_ids("01234", 500, "middle", 1)
    assert a != char_ev.build_prompt_ids("01234", 500, "middle", 2) and a != char_ev.build_prompt_ids("01234", 500, "end", 1)
    assert a == char_ev.build_prompt_ids(1234, 500, 0.5, 1), "an int keeps its leading zeros"


def test_several_needles_stand_where_they_say(char_ev):
    ids, at = char_ev.builder.build("12345", 400, [0.1, 0.5, 0.5, 1.], random.Random(0))
    needle = char_ev.builder.encode(NEEDLE.format(key="12345"))
    assert len(ids) == 400 and [i for i in range(400) if ids[i:i+len(needle)] == needle] == at
    with pytest.raises(ValueError, match="depths=.*rising"): char_ev.builder.build("12345", 400, [0.5, 0.1], random.Random(0))


def test_filler_is_a_function_of_the_seed():
    assert make_filler_text(50, 3) == make_filler_text(50, 3) != make_filler_text(50, 4)
    assert len(make_filler_text(50).split()) == 50 and not re.search(r"\d", make_filler_text(500)) and make_filler_text(0) == ""
    for bad, exc in ((-1, ValueError), (2.5, TypeError)):
        with pytest.raises(exc, match=f"target_tokens={bad}"): make_filler_text(bad)


# ---- the character tokenizer ----

def test_characters_come_back():
    tok = CharTokenizer()
    assert tok.decode(tok.encode(text := "".join(map(chr, range(256))))) == text
    assert tok.decode(torch.tensor([72, 105])) == "Hi" and tok.encode("") == [] and tok.decode([]) == ""


def test_every_id_of_a_large_vocabulary_decodes_to_something_that_can_be_written():
    text = CharTokenizer(2_000_000).decode([0, 0xD7FF, 0xD800, 0xDFFF, 0xE000, 0x10FFFF, 0x110000, 1_999_999])
    assert len(text.encode()) and len(text) == 8 and text.count("\ufffd") == 4


@pytest.mark.parametrize("bad, exc", [(0, ValueError), (-1, ValueError), (256., TypeError), (None, TypeError)])
def test_bad_vocabularies(bad, exc):
    with pytest.raises(exc, match="vocab_size="): CharTokenizer(bad)


def test_a_tokenizer_of_a_larger_vocabulary_is_refused():
    with pytest.raises(ValueError, match="CharTokenizer.*122.*vocab_size=97"): evaluator(CharTokenizer(), 97)


def test_a_tokenizer_without_a_single_blank_is_refused():
    class Twice(CharTokenizer):
        def encode(self, text, add_special_tokens=False): return [x for i in super().encode(text) for x in (i, i)]
    with pytest.raises(ValueError, match="tokenizer Twice.*one token"): PromptBuilder(Twice())


# ---- scoring ----

@pytest.mark.parametrize("output, want", [
    (" 12345.", "12345"), ("12345", "12345"), (" 1234567", None), (" 1234", None), ("", None), (" 01234 56789", "01234"),
    (" 123456 54321", "54321"), (" a12345", None), (" 12345b", None), ("_12345", None), ("é12345", None), ("x 99999,", "99999"),
    ("１２３４５ 12345", "12345"), ("\n12345\n", "12345"), ("12345</s>", "12345")])
def test_scoring(char_ev, output, want): assert char_ev.extract_passkey_from_output(output) == want


def answers(monkeypatch, text): # a model that says this after any prompt
    new = lambda n: torch.tensor([[ord(c) for c in text.ljust(n, "y")[:n]]])
    monkeypatch.setattr(P, "generate", lambda model, ids, n, **kw: torch.cat([ids, new(n)], 1))


def test_only_new_tokens_count(char_ev, monkeypatch):
    "A model that says nothing has not answered, though its prompt holds the key"
    answers(monkeypatch, "x"*16)
    t = char_ev.run_trial(200, 0, "12345", 0.5, 0)
    assert not t.correct and t.answer is None and t.output == "x"*16
    answers(monkeypatch, " 12345.")
    assert char_ev.run_trial(200, 0, "12345", 0.5, 0).correct
    assert not char_ev.run_trial(200, 0, "12346", 0.5, 0).correct


def test_an_answer_that_the_budget_cuts_is_a_miss(char_ev, monkeypatch):
    "Whether a sixth digit would have followed is not known"
    answers(monkeypatch, " 12345.")
    got = {n: char_ev.run_trial(200, 0, "12345", 0.5, 0, max_new_tokens=n) for n in range(1, 9)}
    assert [n for n, t in got.items() if t.correct] == [7, 8] and got[6].output == " 12345" and got[6].answer is None


def test_the_prompt_that_is_run_is_the_one_that_was_built(char_ev, monkeypatch):
    seen = []
    def fake(model, ids, n, temperature, cache):
        seen.append((ids.tolist(), ids.device.type, n, temperature, cache.n_tokens))
        return torch.cat([ids, ids[:, :n]], 1)
    monkeypatch.setattr(P, "generate", fake)
    char_ev.run_trial(200, 0, "12345", 0.3, 7, max_new_tokens=9)
    assert seen == [([char_ev.build_prompt_ids("12345", 200, 0.3, 7)], "cpu", 9, 0., 0)]


def test_prompts_go_to_the_device_of_the_model_when_a_trial_runs(monkeypatch):
    ev, seen = evaluator(CharTokenizer(), 256), []
    monkeypatch.setattr(P, "generate", lambda model, ids, n, **kw: seen.append(ids.device.type) or torch.zeros(1, 216, dtype=torch.long))
    ev.model.to("meta")
    ev.run_trial(200, 0, "12345", 0.5, 0)
    ev.device = torch.device("cpu")
    ev.run_trial(200, 0, "12345", 0.5, 0)
    assert seen == ["meta", "cpu"]


# ---- prompts that begin alike ----

@pytest.fixture(scope="module")
def trained(): return PasskeyEvaluator(*load_pretrained())

DEPTHS = [0, 0.25, 0.5, 0.75, 1]

@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("haystack, wording", [("words", "passkey"), ("prose", "several")])
def test_trials_together_are_those_by_themselves(trained, batch, haystack, wording):
    ev = PasskeyEvaluator(trained.model, trained.tokenizer, haystack=haystack, wording=wording)
    plan = ev.plan([450], 20, DEPTHS, 3, 2)
    got = [t for i in (0, 10) for t in ev.run_trials(plan[i:i+10], batch=batch)]
    want = [ev.run_trial(**p) for p in plan]
    assert [t.depth for t in got[:10]] == sorted(DEPTHS*2, reverse=True)
    assert same(sorted(got, key=lambda t: t.trial)) == same(want)
    if wording == "passkey": assert all(t.correct for t in got)


@pytest.mark.parametrize("batch", [1, 4])
def test_logits_after_a_shared_beginning_are_those_of_the_whole_prompt(trained, monkeypatch, batch):
    logits, reads, true = {}, [], P.prefill
    def fake(model, ids, n, temperature, cache):
        reads.append(ids.numel())
        with torch.no_grad(): out = true(model, ids, cache)
        for row, l in zip(ids.tolist(), out): logits[tuple(row)] = l
        return torch.cat([ids, ids[:, :n]], 1)
    monkeypatch.setattr(P, "generate", fake)
    monkeypatch.setattr(P, "prefill", lambda model, ids, cache: reads.append(ids.numel()) or true(model, ids, cache))
    plan = trained.plan([900], 15, DEPTHS, 5, 1)
    list(trained.run_trials(plan, batch=batch))
    prompts = [trained.build_prompt_ids(p["key"], 900, p["depth"], p["seed"]) for p in plan]
    assert sum(reads) < 0.75*15*900 and len(logits) == 15
    with torch.no_grad(): dense = trained.model(torch.tensor(prompts))[0][:, -1]
    for ids, want in zip(prompts, dense):
        [got] = [l for rest, l in logits.items() if ids[-len(rest):] == list(rest)]
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_one_prompt_twice_and_prompts_of_two_fillers(trained):
    p, q = trained.plan([400], 2, "middle", 1)
    assert same(trained.run_trials([p, p, q])) in ([*same([trained.run_trial(**x) for x in order])] for order in ((p, p, q), (q, p, p)))


# ---- tokenizers of transformers ----

def test_a_tokenizer_from_a_folder(bpe_ev, tmp_path):
    bpe_ev.tokenizer.save_pretrained(tmp_path/"tok")
    ev = evaluator(load_tokenizer(tmp_path/"tok"), 400)
    assert type(ev.tokenizer).__module__.startswith("transformers") and ev.header("middle", 1, 16)["tokenizer"] == type(ev.tokenizer).__name__
    for length in (60, 131, 1000): check_prompt(ev, "00042", length, 0.3, 7)
    assert ev.build_prompt_ids("12345", 300, 0.4, 1) == bpe_ev.build_prompt_ids("12345", 300, 0.4, 1)
    ids = ev.tokenizer.encode(" 12345.", add_special_tokens=False)
    assert ev.score("12345", torch.tensor(ids), length=1, trial=0, depth=0., seed=0, seconds=0.).correct
    with pytest.raises(ValueError, match="tokenizer=.*a folder"): load_tokenizer(tmp_path/"nothing")


# ---- evaluation ----

def test_plan_varies_key_depth_and_filler(char_ev):
    plan = char_ev.plan([300, 400], 5, "spread", 42)
    assert [p["length"] for p in plan] == [300]*5 + [400]*5
    assert [p["depth"] for p in plan[:5]] == [0, 0.25, 0.5, 0.75, 1]
    assert len({p["key"] for p in plan[:5]}) == len({p["seed"] for p in plan[:5]}) == 5
    assert plan == char_ev.plan([300, 400], 5, "spread", 42) != char_ev.plan([300, 400], 5, "spread", 43)
    assert plan[5:] == char_ev.plan([400], 5, "spread", 42), "a length does not depend on the others"


def test_plans_stay_what_they_were(char_ev):
    "Saved results name their trials by seed: another order of draws would make them unrepeatable"
    assert char_ev.plan([4096], 2, "spread", 42) == [dict(length=4096, trial=0, key="70131", depth=0.0, seed=463764766),
                                                     dict(length=4096, trial=1, key="23203", depth=1.0, seed=1096496006)]
    assert char_ev.build_prompt("12345", 120, 0.5, 9) == (
        " timber jacket meadow mirror    The passkey is 12345. bridge amber needle river      What is the passkey? The passkey is")


def test_evaluate_returns_shares_and_an_untrained_model_knows_nothing(char_ev):
    res = char_ev.evaluate([150, 100, 150], n_trials=3, passkey_position="spread")
    assert list(res.items()) == [(150, 0.), (100, 0.)] and len(char_ev.trials) == 6, "a length given twice runs once"
    assert [(r["length"], r["hits"], r["trials"]) for r in summarize(char_ev.trials)] == [(100, 0, 3), (150, 0, 3)]
    assert list(char_ev.evaluate(iter([120, 110]), n_trials=1)) == [120, 110]
    assert char_ev.evaluate([], n_trials=3) == {} and char_ev.trials == []


def test_evaluate_counts_hits(char_ev, monkeypatch):
    keys = [p["key"] for p in char_ev.plan([100], 4)]
    answers(monkeypatch, f" {keys[2]}.")
    assert char_ev.evaluate([100], 4) == {100: 0.25}
    assert [t.correct for t in char_ev.trials] == [False, False, True, False]


@pytest.mark.parametrize("lengths, n, position, match", [
    ([100, 20], 1, "middle", "context_length=20.*at least 58"), ([100, -5], 1, "middle", "context_length=-5"), ([100.5], 1, "middle", "context_length=100.5"),
    ([True], 1, "middle", "context_length=True"), (100, 1, "middle", r"context_lengths=100.*\[100\]"), ([100], 0, "middle", "n_trials=0.*at least 1"),
    ([100], 100_001, "middle", "n_trials=100001.*at most 100000"), ([100], 2.0, "middle", "n_trials=2.0"), ([100], 1, "top", "passkey_position='top'")])
def test_bad_evaluations_are_refused_before_anything_runs(char_ev, monkeypatch, lengths, n, position, match):
    monkeypatch.setattr(P, "generate", None)
    before = char_ev.trials
    with pytest.raises((ValueError, TypeError), match=match): char_ev.evaluate(lengths, n, position)
    assert char_ev.trials is before
    for bad in (-1, "x", 1.5):
        with pytest.raises((ValueError, TypeError), match="base_seed="): char_ev.plan([100], 1, base_seed=bad)


@pytest.mark.parametrize("bad", ["1234", "123456", "1234a", 123456, -1, None, True, 1.5, "１２３４５", "12345\n", b"12345"])
def test_bad_keys(char_ev, bad):
    with pytest.raises(ValueError, match="passkey=.*five digits"): char_ev.build_prompt_ids(bad, 200)


@pytest.mark.parametrize("bad", ["top", -0.1, 1.1, float("nan"), None])
def test_bad_positions(char_ev, bad):
    with pytest.raises(ValueError, match="passkey_position="): char_ev.build_prompt_ids("12345", 200, bad)


@pytest.mark.parametrize("length", [0, 1, 57])
def test_too_short_a_context_says_what_it_takes(char_ev, length):
    with pytest.raises(ValueError, match="context_length=.*at least 58"): char_ev.build_prompt_ids("12345", length)


# ---- a run that can be broken off ----

GRID = dict(context_lengths=[90, 70], n_trials=12, passkey_position=[0, 0.5, 1], fillers=2)
same = lambda trials: [(t.length, t.trial, t.key, t.depth, t.seed, t.output, t.correct) for t in trials]

def test_a_grid_gives_each_filler_each_depth_equally_often(char_ev):
    plan = char_ev.plan(**GRID)
    for n in (90, 70):
        cells = [(p["seed"], p["depth"]) for p in plan if p["length"] == n]
        assert len(set(cells)) == 6 and all(cells.count(c) == 2 for c in cells)
        assert len({p["key"] for p in plan if p["length"] == n}) == 12
    for bad in (dict(n_trials=10), dict(n_trials=6, fillers=4), dict(n_trials=4, fillers=None)):
        with pytest.raises(ValueError, match=f"n_trials={bad['n_trials']}.*multiple"): char_ev.plan(**GRID | bad)
    for bad in (0, 1.5, "2"):
        with pytest.raises((ValueError, TypeError), match="fillers="): char_ev.plan(**GRID | dict(fillers=bad))
    with pytest.raises(ValueError, match="passkey_position=.]"): char_ev.plan(**GRID | dict(passkey_position=[]))


@pytest.mark.parametrize("cut", [0, 1, 40, 400, 1500, 2500])
def test_a_run_that_was_killed_goes_on_where_it_stopped(char_ev, tmp_path, monkeypatch, cut):
    log = tmp_path/"t.jsonl"
    char_ev.evaluate(**GRID, log=log, run=dict(machine="a"))
    whole, want = log.read_text(), same(char_ev.trials)
    log.write_text(whole[:cut])
    kept, ran = sum(line.startswith('{"length"') for line in whole[:cut].split("\n")[:-1]), []
    true = PasskeyEvaluator.score
    monkeypatch.setattr(PasskeyEvaluator, "score", lambda self, *a, **kw: ran.append(kw) or true(self, *a, **kw))
    char_ev.evaluate(**GRID, log=log, run=dict(machine="b"))
    assert same(char_ev.trials) == want and sorted(want) == sorted(same(read_log(log)[2])) and len(ran) == 24 - kept
    assert [r["machine"] for r in read_log(log)[1]] == (["a", "b"] if kept else ["b"])
    text, ran[:] = log.read_text(), []
    char_ev.evaluate(**GRID, log=log)
    assert log.read_text() == text and not ran, "a finished run runs nothing and writes nothing"


def test_each_trial_is_in_the_file_before_the_next_one_runs(char_ev, tmp_path, monkeypatch):
    log, true = tmp_path/"t.jsonl", PasskeyEvaluator.score
    def dies(self, *a, **kw):
        if kw["trial"] == 3: raise KeyboardInterrupt
        return true(self, *a, **kw)
    monkeypatch.setattr(PasskeyEvaluator, "score", dies)
    with pytest.raises(KeyboardInterrupt): char_ev.evaluate(**GRID, log=log)
    assert [t.trial for t in read_log(log)[2]] == [2, 5, 1, 4, 0], "deepest first, until trial 3"


def test_more_lengths_go_to_the_same_file(char_ev, tmp_path):
    log = tmp_path/"t.jsonl"
    char_ev.evaluate([90], 3, log=log)
    char_ev.evaluate([90, 70], 3, log=log)
    assert [t.length for t in read_log(log)[2]] == [90]*3 + [70]*3 and len(char_ev.trials) == 6


@pytest.mark.parametrize("other, match", [(dict(base_seed=43), "seed=42 and not 43"), (dict(max_new_tokens=9), "max_new_tokens=16 and not 9"),
                                          (dict(passkey_position="spread"), "position="), (dict(n_trials=6), "trial . at 90 tokens is another"),
                                          (dict(fillers=1), "trial . at 90 tokens is another")])
def test_a_file_of_another_run_is_refused_and_left_alone(char_ev, tmp_path, other, match):
    log = tmp_path/"t.jsonl"
    char_ev.evaluate(**GRID, log=log)
    text = log.read_text()
    with pytest.raises(ValueError, match=match): char_ev.evaluate(**GRID | other, log=log)
    assert log.read_text() == text


def test_a_file_of_another_model_is_refused(char_ev, bpe_ev, tmp_path):
    char_ev.evaluate([90], 1, log=tmp_path/"t.jsonl")
    with pytest.raises(ValueError, match="another run, with config="): bpe_ev.evaluate([90], 1, log=tmp_path/"t.jsonl")
    other = PasskeyEvaluator(GPTOSS(char_ev.model.cfg), CharTokenizer())
    with pytest.raises(ValueError, match="another run, with digest="): other.evaluate([90], 1, log=tmp_path/"t.jsonl")


@pytest.mark.parametrize("text", ["hello", "hello\n", "{}\n", '{"log": "another"}\n', '{"log": "gptoss-lite passkey 1"}\n'])
def test_a_file_of_something_else_is_refused_and_left_alone(char_ev, tmp_path, text):
    (tmp_path/"t.jsonl").write_text(text)
    with pytest.raises(ValueError, match="log=.*name another"): char_ev.evaluate([90], 1, log=tmp_path/"t.jsonl")
    assert (tmp_path/"t.jsonl").read_text() == text


def test_damaged_files_are_refused(char_ev, tmp_path):
    log = tmp_path/"t.jsonl"
    char_ev.evaluate([90], 3, log=log)
    lines = log.read_text().splitlines(True)
    for i, bad, match in ((3, "{\n", "line 4"), (3, '{"length": 90}\n', "line 4"), (4, lines[3], "twice")):
        log.write_text("".join(lines[:i] + [bad] + lines[i+1:]))
        with pytest.raises(ValueError, match=match): read_log(log)


# ---- what a count is worth ----

def test_wilson():
    lo, hi = wilson_interval(85, 100)
    assert (round(lo, 3), round(hi, 3)) == (0.767, 0.907)  # the specification's case
    assert wilson_interval(0, 7)[0] == 0 and wilson_interval(7, 7)[1] == pytest.approx(1)
    assert wilson_interval(100, 100)[0] == pytest.approx(100/(100 + 3.8415), abs=1e-4)
    assert wilson_interval(0, 0) == (0, 1)
    for bad in (-1, 8):
        with pytest.raises(ValueError, match=f"hits={bad}.*0..7"): wilson_interval(bad, 7)


def test_targets(): assert [target_at(n) for n in (1, 32_768, 32_769, 98_305, 131_072, 131_073)] == [0.95, 0.95, 0.90, 0.85, 0.85, None]


# ---- pictures ----

def trials_of(lengths, depths, right): return [Trial(n, i, "1"*5, d, 0, "", None, right(n, d), 0.) for n in lengths for i, d in enumerate(depths)]

@pytest.fixture
def heatmap():
    "Draws without pyplot, so that no figure stays open"
    from matplotlib.figure import Figure
    return lambda trials, **kw: plot_heatmap(trials, Figure().subplots(), **kw)


def test_heatmap_shows_each_cell(heatmap):
    ax = heatmap(trials_of((100, 200), (0., 0.5, 1.), lambda n, d: n + d < 200.5))
    assert [t.get_text() for t in ax.texts] == ["100%", "100%", "100%", "0%", "100%", "0%"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["0%", "50%", "100%"] and "6 trials" in ax.get_title()


def test_heatmap_gathers_many_depths_in_bands(heatmap):
    ax = heatmap(trials_of((100,), [i/99 for i in range(100)], lambda n, d: d >= 0.5))
    assert [t.get_text() for t in ax.texts] == ["0%"]*5 + ["100%"]*5
    assert ax.get_yticklabels()[9].get_text() == "90% to 100%"


def test_heatmap_leaves_cells_without_trials_empty(heatmap):
    ax = heatmap(trials_of((100,), (0., 1.), lambda n, d: True) + trials_of((200,), (0.,), lambda n, d: True))
    assert len(ax.texts) == 3
    with pytest.raises(ValueError, match="at least 1 trial"): heatmap([])


# ---- the model in the package ----

RESULTS = Path(__file__).parent.parent/"results"

@pytest.mark.parametrize("file, n, fillers", [("passkey", 100, 10), ("passkey-beyond", 5, 1), *((f"passkey-{x}", 20, 4) for x in
                                              (*HAYSTACKS, *WORDINGS) if x not in ("words", "passkey"))])
def test_the_saved_results_are_those_of_this_model_and_can_be_repeated(file, n, fillers):
    "A new checkpoint, or prompts drawn in another way, would leave a stale table and a stale figure"
    path = RESULTS/f"{file}.jsonl"
    if not path.exists(): pytest.skip(f"{path.name} was not made yet")
    head, runs, trials = read_log(path)
    ev = PasskeyEvaluator(*load_pretrained(), haystack=head["haystack"], wording=head["wording"])
    assert file in ("passkey", "passkey-beyond") or file.removeprefix("passkey-") in (head["haystack"], head["wording"])
    now = ev.header(head["position"], head["seed"], head["max_new_tokens"])
    assert head == {"log": head["log"], **now} and [float(x) for x in head["position"]] == DEPTHS
    assert all({"commit", "machine", "threads", "torch", "time"} <= r.keys() and len(r["commit"]) == 40 for r in runs)
    plan = {(p["length"], p["trial"]): p for p in ev.plan(sorted({t.length for t in trials}), n, DEPTHS, head["seed"], fillers)}
    for t in trials:
        assert (t.key, t.depth, t.seed) == tuple(plan[t.length, t.trial][k] for k in ("key", "depth", "seed"))
        assert (t.answer == t.key) == t.correct and t.answer == ev.extract_passkey_from_output(t.output + "_")
    short = [t for t in trials if t.length <= 4096]
    for t in short[:2]: assert same([ev.run_trial(**plan[t.length, t.trial])]) == same([t])


def test_the_run_was_made_with_seeds_of_its_own():
    head, _, _ = read_log(RESULTS/"passkey.jsonl")
    tried = json.loads((RESULTS/"choice.json").read_text())["tried"]
    assert head["seed"] not in {c["seed"] for c in tried}
    assert [c["digest"] for c in tried if c["chosen"]] == [head["digest"]]


def test_the_two_forms_of_the_result_say_the_same():
    saved = json.loads((RESULTS/"passkey.json").read_text())
    if saved["seed"] != read_log(RESULTS/"passkey.jsonl")[0]["seed"]: pytest.skip("the long run is under way")
    trials = {(t.length, t.trial): t for t in read_log(RESULTS/"passkey.jsonl")[2]}
    assert {(t["length"], t["trial"]): Trial(**t) for t in saved["trials"]} == trials
    assert saved["summary"] == summarize(list(trials.values()))


def test_unknown_pretrained_name():
    with pytest.raises(ValueError, match="name='nope'"): load_pretrained("nope")
    with pytest.raises(ValueError, match="name="): load_pretrained("../passkey")


def test_pretrained_comes_with_its_evaluation_configuration_or_another():
    model, tokenizer = load_pretrained()
    assert model.cfg.yarn_scale_factor == 32 and not model.cfg.yarn_mscale and tokenizer.vocab_size == model.cfg.vocab_size
    plain, _ = load_pretrained(cfg=model.cfg.replace(yarn_scale_factor=1))
    assert plain.cfg.yarn_scale_factor == 1 and torch.equal(plain.embed.weight, model.embed.weight)


def test_pretrained_finds_the_key():
    ev = PasskeyEvaluator(*load_pretrained())
    assert ev.evaluate([512, 1024], n_trials=3, passkey_position="spread", base_seed=5_000_000) == {512: 1., 1024: 1.}


@pytest.mark.parametrize("output", ["0.12345", "12345.6", "1,12345", "12345,678", "x12345", "12345_"])
def test_part_of_another_number_is_no_answer(char_ev, output): assert char_ev.extract_passkey_from_output(output) is None


def test_a_tokenizer_that_drops_words_is_refused():
    class Mute(CharTokenizer):
        def encode(self, text, add_special_tokens=False): return super().encode(text) if len(text) == 1 else []
    with pytest.raises(ValueError, match="tokenizer Mute.*every word"): PromptBuilder(Mute())


def test_a_prompt_of_the_evaluated_length_does_not_warn(recwarn):
    ev = PasskeyEvaluator(GPTOSS(gptoss_tiny().replace(vocab_size=256, eval_max_seq_len=100)), CharTokenizer())
    ev.evaluate([100], n_trials=1)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="eval_max_seq_len=100"): ev.evaluate([101], n_trials=1)
