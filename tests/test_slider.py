"""Figures that a reader steps through: what is saved, and that the pictures show what the buffers hold."""
import base64, json, re
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from gptoss_lite import growth, lessons, ring
from gptoss_lite.growth import GrowingBuffer
from gptoss_lite.ring import RingBuffer

NBS = Path(__file__).resolve().parent.parent/"nbs"
SLIDERS = {"04_ring": ring, "05_growth": growth}
STEPS = 12

def cell(name):
    "The one cell with a slider"
    cells = json.loads((NBS/f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    found = [c for c in cells if c["cell_type"] == "code" and "\nshow_steps(" in "".join(c["source"])]
    assert len(found) == 1, f"{name}: {len(found)} cells"
    return found[0]

def saved(name):
    "The still, the slider, and the data in it"
    outs = [{k: "".join(v) for k, v in o["data"].items()} for o in cell(name)["outputs"]]
    assert [sorted(o) for o in outs] == [["image/png", "text/plain"], ["text/html", "text/plain"]]
    html = outs[1]["text/html"]
    label, texts, frames, still = json.loads(re.search(r"\.\.\.(\[\n.*\n\])\);\n</script>$", html, re.S)[1])
    return outs[0]["image/png"].strip(), html, texts, frames, still

def drawn(fig):
    "A figure as words: where each text stands, and where each box has which colour"
    ax = fig.axes[0]
    return (*((*t.get_position(), t.get_text(), t.get_weight()) for t in ax.texts),
            *((*p.get_bbox().bounds, p.get_facecolor()) for p in ax.patches))

def run(name, **instead):
    "Run the cell with other names in it; what it hands to `show_steps`, each picture as words"
    got = []
    names = {**vars(lessons), **vars(SLIDERS[name]), "pairwise": pairwise, "plt": plt, "png": drawn,
             "show_steps": lambda frames, label, still=-1: got.append(frames), **instead}
    exec("".join(cell(name)["source"]), names)
    return got[0]

@pytest.mark.parametrize("name", SLIDERS)
def test_what_is_saved(name):
    still, html, texts, frames, at = saved(name)
    assert len(frames) == len(texts) == STEPS and still == frames[at] and at == STEPS - 1
    assert len(set(frames)) == len(set(texts)) == STEPS
    assert all(base64.b64decode(f)[:4] == b"\x89PNG" for f in frames)
    assert len(html) + len(still) < 150_000, f"{len(html) + len(still)} characters"
    assert re.search(r'^#\| fig-alt: ".{100}', "".join(cell(name)["source"]), re.M)

@pytest.mark.parametrize("name", SLIDERS)
def test_without_a_script_only_the_still_is_there_and_nothing_is_asked_of_others(name):
    _, html, _, frames, _ = saved(name)
    assert re.fullmatch(r'<div data-steps="[0-9a-f]{8}"></div>\n', re.sub(r"<script>\n.*\n</script>", "", html, flags=re.S))
    for f in frames: html = html.replace(f, "")
    assert not re.search(r"https?:|//\w|url\(|import|fetch", html)

@pytest.mark.parametrize("name", SLIDERS)
def test_the_saved_words_and_the_script_are_those_of_today(name):
    _, html, texts, _, _ = saved(name)
    again = f'run make refresh NB="nbs/{name}.ipynb"'
    assert [text for _, text in run(name)] == texts, again
    assert f"<script>\n({lessons._SLIDER})(" in html, again

def test_the_same_on_every_run_and_each_its_own_place():
    make = lambda n: [(lessons.png(lessons.figure(w=1, h=1)[0]), f"{n}: a </script> & <b>")]
    a, b, again = (lessons.steps_html(make(n), "step") for n in (1, 2, 1))
    plt.close("all")
    assert a == again and a.split("\n")[0] != b.split("\n")[0]
    assert a.count("</script>") == 1 and "<b>" not in a


# ---- the pictures come from the buffers ------------------------------------------------------------------------

def numbers_in(text): return [int(n) for n in re.findall(r"\d+", text)]

def test_the_ring_says_what_a_ring_does():
    for t, (_, text) in enumerate(run("04_ring"), 1):
        W, n = 4, numbers_in(text)
        over = [t - W] if t > W else []
        assert n == [t, (t-1) % W, *over, *range(max(1, t-W+1), t+1), t % W], text

def test_the_growing_buffer_says_what_growing_by_half_does():
    slots = copied = 0
    for t, (_, text) in enumerate(run("05_growth"), 1):
        grows = t > slots
        moved = t - 1 if grows else 0
        slots, copied = slots + slots//2 + 1 if grows else slots, copied + moved
        assert numbers_in(text) == [t, slots if grows else t - 1, moved, copied, slots - t], text

class Backwards(RingBuffer):
    "A ring that turns the other way"
    def _write(self, k, v):
        if self.n_tokens: self.head = (self.head - 2) % self.slots
        super()._write(k, v)

class Double(GrowingBuffer):
    "A buffer that grows by two"
    def _move(self, like, capacity): super()._move(like, max(1, 2*self.capacity))

class Shifted(GrowingBuffer):
    "A buffer that swaps its two oldest tokens when it grows"
    def _move(self, like, capacity):
        super()._move(like, capacity)
        if self.length > 1: self.k[:, :, :2] = self.k[:, :, :2].flip(2)

@pytest.mark.parametrize("name, wrong", [("04_ring", dict(RingBuffer=Backwards)), ("05_growth", dict(GrowingBuffer=Double)),
                                         ("05_growth", dict(GrowingBuffer=Shifted))])
def test_another_buffer_makes_other_pictures(name, wrong):
    right, other = run(name), run(name, **wrong)
    assert [f for f, _ in right] == [f for f, _ in run(name)]
    assert sum(a != b for (a, _), (b, _) in zip(right, other, strict=True)) >= STEPS - 5
