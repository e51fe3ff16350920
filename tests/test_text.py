"""Text from tokens: whole characters and stop strings do not depend on how the text was cut, for toy tokenizers and real ones."""
import pytest
import torch
from hypothesis import given, strategies as st

from gptoss_lite.cache import MixedKVCache
from gptoss_lite.generation import generate, stream, stream_text
from gptoss_lite.text import stop_strings, until_stop, whole_characters
from oracle import config, examples, random_ids, random_model

class Bytes:
    "One token per byte"
    def encode(self, text): return list(text.encode())
    def decode(self, ids, skip_special_tokens=True): return bytes(ids).decode(errors="replace")

class PerByte(Bytes):
    "Shows a U+FFFD for each byte of a character that is not whole, as byte fallback does"
    def decode(self, ids, skip_special_tokens=True):
        b, text = bytes(ids), ""
        while b:
            for n in (1, 2, 3, 4):
                try: text += b[:n].decode(); b = b[n:]; break
                except UnicodeDecodeError: pass
            else: text += "\ufffd"; b = b[1:]
        return text

class Pairs(Bytes):
    "Two bytes a token, so that a token may end one character and begin another"
    def encode(self, text): b = text.encode(); return [int.from_bytes(b[i:i+2], "big") + 256*(len(b[i:i+2]) == 2) for i in range(0, len(b), 2)]
    def decode(self, ids, skip_special_tokens=True):
        return b"".join((i - 256).to_bytes(2, "big") if i >= 256 else bytes([i]) for i in ids).decode(errors="replace")

texts = st.text(st.sampled_from("ab é🦜中\n\u0301"), max_size=30)

@pytest.mark.parametrize("tok", [Bytes(), PerByte(), Pairs()], ids=lambda t: type(t).__name__)
@examples(60)
@given(prompt=texts, text=texts)
def test_pieces_are_the_text_in_whole_characters(tok, prompt, text):
    ids = tok.encode(text)
    pieces = list(whole_characters(tok, iter(ids), tok.encode(prompt)))
    assert "".join(pieces) == text and all(pieces) and not any("\ufffd" in p for p in pieces)

@pytest.mark.parametrize("tok", [Bytes(), Pairs()], ids=lambda t: type(t).__name__)
@examples(60)
@given(text=texts)
def test_as_early_as_possible(tok, text):
    "After each token all whole characters so far have been said"
    ids, said = tok.encode(text), []
    def tokens():
        for n, t in enumerate(ids):
            yield t
            assert "".join(said) == tok.decode(ids[:n+1]).rstrip("\ufffd")
    for p in whole_characters(tok, tokens()): said.append(p)

@examples(60)
@given(ids=st.lists(st.integers(0, 255), max_size=30))
def test_bytes_that_are_no_text(ids):
    "The pieces are still what the decoder shows for the whole"
    assert "".join(whole_characters(Bytes(), ids)) == Bytes().decode(ids)

class Words:
    "A word a token, with its blank in front, which is dropped where a text begins, as SentencePiece does"
    words = ["▁a", "▁dog", "s", "▁bark", "▁"]
    def decode(self, ids, skip_special_tokens=True): return "".join(self.words[i] for i in ids).replace("▁", " ").removeprefix(" ")

@examples(60)
@given(prompt=st.lists(st.integers(0, 4), max_size=12), ids=st.lists(st.integers(0, 4), max_size=30))
def test_a_tokenizer_that_drops_the_first_blank(prompt, ids):
    "Whatever the window, each blank is said once: the pieces are what the new tokens add to the text"
    pieces = list(whole_characters(Words(), ids, prompt))
    tail = prompt[-8:] # what the first window sees
    assert "".join(pieces) == Words().decode(tail + ids)[len(Words().decode(tail)):]

def test_a_character_that_began_in_the_prompt():
    b = "🦜x".encode()
    assert list(whole_characters(Bytes(), b[2:], b[:2])) == ["🦜", "x"]
    assert list(whole_characters(Bytes(), [], b[:2])) == [] # nothing new, nothing said

# ---- stop strings ----------------------------------------------------------------------------------------------

def before(text, stops):
    "By reading character by character: the first stop string that is complete, the longest of those"
    for end in range(1, len(text) + 1):
        lengths = [len(s) for s in stops if text[:end].endswith(s)]
        if lengths: return text[:end-max(lengths)]
    return text

@examples(200)
@given(data=st.data(), text=st.text("ab", max_size=20), stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_any_cut_says_the_same(data, text, stops):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    read = []
    def pieces():
        for a, b in zip(cuts, cuts[1:]):
            read.append(text[a:b])
            yield text[a:b]
            if before("".join(read), stops) == "".join(read): # no stop string yet: what is held back might begin one
                held = len("".join(read)) - len("".join(said))
                assert any(s.startswith("".join(read)[-held:]) for s in stops) if held else True
    said = []
    for p in until_stop(pieces(), stops): said.append(p)
    assert "".join(said) == before(text, stops) and all(said)

@pytest.mark.parametrize("bad,exc", [("", ValueError), (["a", ""], ValueError), ([1], TypeError), (["a", None], TypeError)])
def test_impossible_stop_strings(bad, exc):
    with pytest.raises(exc, match="stop has"): stop_strings(bad)

# ---- through a model -------------------------------------------------------------------------------------------

CFG = config(vocab_size=97)

class Letters:
    def decode(self, ids, skip_special_tokens=True): return "".join(chr(0x100 + int(i)) for i in ids)

@pytest.fixture
def model(): return random_model(CFG)

@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("options", [dict(), dict(temperature=1.2, seed=3, top_k=9), dict(eos_token_id=list(range(20)), temperature=1., seed=1)], ids=str)
def test_stream_text_is_stream(model, use_cache, options):
    ids, options = random_ids(CFG, 1, 7), {**dict(temperature=0, use_cache=use_cache), **options}
    tokens = [t.item() for t in stream(model, ids, 30, **options)]
    assert "".join(stream_text(model, ids, 30, tokenizer=Letters(), **options)) == Letters().decode(tokens)

def test_the_stop_string_is_left_out_and_the_cache_goes_on(model):
    ids = random_ids(CFG, 1, 7)
    whole = generate(model, ids, 40, 0)
    text = Letters().decode(whole[0, 7:].tolist())
    for length in (1, 2, 5):
        cache, stop = MixedKVCache(), text[11:11+length]
        at = text.index(stop)
        assert "".join(stream_text(model, ids, 40, 0, tokenizer=Letters(), stop=[stop], cache=cache)) == text[:at]
        n = 7 + at + length # all of the stop string was chosen
        assert cache.n_tokens == n - 1
        assert torch.equal(generate(model, ids[:, :0], 47 - n, 0, cache=cache), whole[:, n:])

def test_a_consumer_that_stops_early(model):
    "Left after some pieces, closed or dropped, the stream under it is closed and the cache goes on"
    ids = random_ids(CFG, 1, 7)
    whole = generate(model, ids, 20, 0)
    for close in (True, False):
        cache, got = MixedKVCache(), ""
        pieces = stream_text(model, ids, 20, 0, tokenizer=Letters(), cache=cache)
        for p in pieces:
            got += p
            if len(got) == 5: break
        if close: pieces.close()
        del pieces
        n = cache.n_tokens + 1
        assert torch.equal(generate(model, ids[:, :0], 27 - n, 0, cache=cache), whole[:, n:])

def test_refused_at_once(model):
    ids = random_ids(CFG, 2, 7)
    with pytest.raises(ValueError, match="2 rows: must be 1"): stream_text(model, ids, tokenizer=Letters())
    with pytest.raises(ValueError, match="empty string"): stream_text(model, ids[:1], tokenizer=Letters(), stop="")
    with pytest.raises(ValueError, match="top_p"): stream_text(model, ids[:1], top_p=2., tokenizer=Letters())
    with pytest.raises(TypeError, match="tokenizer"): stream_text(model, ids[:1])

def test_a_real_tokenizer():
    "A byte-pair tokenizer of transformers, trained here: characters that are split over tokens, special tokens left out"
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    tok = tokenizers.Tokenizer(tokenizers.models.BPE())
    tok.pre_tokenizer, tok.decoder = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator(["the old dog barks at the moon, the moon is old"]*20, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<end>")
    text = "the dog 🦜 é 中文\nbarks naïvely"
    ids = fast.encode(text, add_special_tokens=False)
    pieces = list(whole_characters(fast, ids + [fast.eos_token_id]))
    assert "".join(pieces) == text and not any("\ufffd" in p for p in pieces) and len(ids) > len(pieces) > 5
    assert "".join(until_stop(whole_characters(fast, ids), ["\nbark"])) == text[:text.index("\nbark")]
