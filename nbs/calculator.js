// What a key-value cache weighs, and what that allows: the formulas, and the page that shows them.
// Node loads this file too: tests/test_calculator.py holds the formulas to gptoss_lite.memory and gptoss_lite.roofline.
"use strict";
(function () {

// ---- facts ---------------------------------------------------------------------------------------------------
// Sizes as the models' own config.json gives them; `windowed` counts the layers that keep the last `window` tokens.
// A dense model is one with no routed expert and one that every token takes. `expertBits` is what a weight of a
// routed expert takes in the published file, 16 bits where nothing is said; `context` is the length it is made for.
const HF = "https://huggingface.co/";
const dense = {experts: 0, taken: 0, shared: 1, sinks: false};
const MODELS = {
  "ours": {name: "gptoss-lite, 502M", vocab: 128000, width: 768, layers: 12, windowed: 6, window: 128, heads: 8,
    kvHeads: 4, headDim: 96, ffn: 1536, experts: 8, taken: 2, shared: 1, sinks: true, tied: true, context: 131072,
    source: "config.html"},
  "gpt-oss-20b": {name: "gpt-oss-20b", vocab: 201088, width: 2880, layers: 24, windowed: 12, window: 128, heads: 64,
    kvHeads: 8, headDim: 64, ffn: 2880, experts: 32, taken: 4, shared: 0, sinks: true, tied: false, context: 131072,
    expertBits: 4.25, source: HF + "openai/gpt-oss-20b/blob/main/config.json"},
  "gpt-oss-120b": {name: "gpt-oss-120b", vocab: 201088, width: 2880, layers: 36, windowed: 18, window: 128, heads: 64,
    kvHeads: 8, headDim: 64, ffn: 2880, experts: 128, taken: 4, shared: 0, sinks: true, tied: false, context: 131072,
    expertBits: 4.25, source: HF + "openai/gpt-oss-120b/blob/main/config.json"},
  "gemma-3-4b": {...dense, name: "Gemma 3 4B", vocab: 262208, width: 2560, layers: 34, windowed: 29, window: 1024,
    heads: 8, kvHeads: 4, headDim: 256, ffn: 10240, tied: true, context: 131072,
    source: HF + "google/gemma-3-4b-it/blob/main/config.json"},
  "gemma-3-12b": {...dense, name: "Gemma 3 12B", vocab: 262208, width: 3840, layers: 48, windowed: 40, window: 1024,
    heads: 16, kvHeads: 8, headDim: 256, ffn: 15360, tied: true, context: 131072,
    source: HF + "google/gemma-3-12b-it/blob/main/config.json"},
  "gemma-3-27b": {...dense, name: "Gemma 3 27B", vocab: 262208, width: 5376, layers: 62, windowed: 52, window: 1024,
    heads: 32, kvHeads: 16, headDim: 128, ffn: 21504, tied: true, context: 131072,
    source: HF + "google/gemma-3-27b-it/blob/main/config.json"},
  "mistral-7b": {...dense, name: "Mistral 7B v0.1", vocab: 32000, width: 4096, layers: 32, windowed: 32, window: 4096,
    heads: 32, kvHeads: 8, headDim: 128, ffn: 14336, tied: false, context: 32768,
    source: HF + "mistralai/Mistral-7B-v0.1/blob/main/config.json"},
  "mistral-small": {...dense, name: "Mistral Small 3 24B", vocab: 131072, width: 5120, layers: 40, windowed: 0, window: 1,
    heads: 32, kvHeads: 8, headDim: 128, ffn: 32768, tied: false, context: 32768,
    source: HF + "mistralai/Mistral-Small-24B-Base-2501/blob/main/config.json"},
  "qwen-3-8b": {...dense, name: "Qwen 3 8B", vocab: 151936, width: 4096, layers: 36, windowed: 0, window: 1, heads: 32,
    kvHeads: 8, headDim: 128, ffn: 12288, tied: false, context: 40960,
    source: HF + "Qwen/Qwen3-8B/blob/main/config.json"},
  "qwen-3-30b-a3b": {name: "Qwen 3 30B-A3B", vocab: 151936, width: 2048, layers: 48, windowed: 0, window: 1, heads: 32,
    kvHeads: 4, headDim: 128, ffn: 768, experts: 128, taken: 8, shared: 0, sinks: false, tied: false, context: 40960,
    source: HF + "Qwen/Qwen3-30B-A3B/blob/main/config.json"},
  "llama-3.1-8b": {...dense, name: "Llama 3.1 8B", vocab: 128256, width: 4096, layers: 32, windowed: 0, window: 1,
    heads: 32, kvHeads: 8, headDim: 128, ffn: 14336, tied: false, context: 131072,
    source: HF + "meta-llama/Llama-3.1-8B/blob/main/config.json"},
  "llama-3.1-70b": {...dense, name: "Llama 3.1 70B", vocab: 128256, width: 8192, layers: 80, windowed: 0, window: 1,
    heads: 64, kvHeads: 8, headDim: 128, ffn: 28672, tied: false, context: 131072,
    source: HF + "meta-llama/Llama-3.1-70B/blob/main/config.json"},
};
// Memory in GB (10^9 bytes), bandwidth in TB/s, dense bf16 peak in TFLOP/s; the sources are those of gptoss_lite.roofline
const CARDS = {
  "a100": {name: "A100 80GB SXM", memory: 80, bandwidth: 2.04, tflops: 312, source: "https://www.nvidia.com/content/dam/" +
    "en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"},
  "h100": {name: "H100 80GB SXM", memory: 80, bandwidth: 3.35, tflops: 989, source: "https://www.nvidia.com/en-us/data-center/h100/"},
  "h200": {name: "H200 141GB SXM", memory: 141, bandwidth: 4.8, tflops: 989, source: "https://www.nvidia.com/en-us/data-center/h200/"},
};

// ---- formulas ------------------------------------------------------------------------------------------------

// Parameters: in memory, read for one token, and of both what lies in routed experts
function parameters(m) {
  const C = m.width, D = m.headDim, L = m.layers, expert = 3*C*m.ffn;
  const rest = L*(2*C*m.heads*D + 2*C*m.kvHeads*D + (m.sinks ? m.heads : 0) + m.shared*expert + C*m.experts + 2*C) + C;
  const head = m.vocab*C, routed = L*m.experts*expert, taken = L*m.taken*expert;
  return {total: (m.tied ? 1 : 2)*head + rest + routed, read: head + rest + taken, routed, taken};
}

// Bytes of the weights: in memory, and read for one token
function weights(m) {
  const p = parameters(m), bits = m.expertBits || 16;
  return {total: 2*(p.total - p.routed) + bits/8*p.routed, read: 2*(p.read - p.taken) + bits/8*p.taken};
}

// Bytes of one token's key and value in one layer
const perToken = s => 2*s.kvHeads*s.headDim*s.kvBytes;

// Slots that one sequence holds: a windowed layer the last W, a global layer all T
const windowedSlots = (s, T) => s.windowed*Math.min(T, s.window);
const globalSlots = (s, T) => (s.layers - s.windowed)*T;

const cacheBytes = (s, T, full) =>
  s.batch*perToken(s)*(full ? s.layers*T : windowedSlots(s, T) + globalSlots(s, T));

const reduction = (s, T) => s.layers*T/(windowedSlots(s, T) + globalSlots(s, T));

// What weights and reserve leave to the cache, bytes
const room = s => Math.round(1e9*(s.memory - s.weights - s.reserve));

// The largest T whose cache fits: 0 if not even one token does, Infinity if all layers stop growing before
function largestT(s) {
  const slots = Math.floor(room(s)/(s.batch*perToken(s))), global = s.layers - s.windowed;
  const T = Math.max(0, Math.floor(slots/s.layers)); // right as long as no window is full
  if (!s.windowed || T < s.window) return T;
  return global ? Math.floor((slots - s.windowed*s.window)/global) : Infinity;
}

// One decode step of the whole batch: each weight is read once, each sequence reads its own cache. With experts and
// a batch more weights may be read, up to all of them: this is the case that is best for speed.
function step(s) {
  const nbytes = 1e9*s.read + cacheBytes(s, s.T);
  const slots = windowedSlots(s, s.T) + globalSlots(s, s.T);
  const flops = s.batch*(2e9*s.active + 4*s.heads*s.headDim*slots);
  const byMemory = nbytes/(1e12*s.bandwidth), byArithmetic = flops/(1e12*s.tflops);
  return {nbytes, flops, byMemory, byArithmetic, seconds: Math.max(byMemory, byArithmetic)};
}

// Everything that the page says
function report(s) {
  const T = s.T, one = s.batch*perToken(s), t = step(s), most = largestT(s);
  return {perToken: perToken(s), windowed: one*windowedSlots(s, T), global: one*globalSlots(s, T),
    total: cacheBytes(s, T), full: cacheBytes(s, T, true), reduction: reduction(s, T), room: room(s), largestT: most,
    fits: T <= most, nbytes: t.nbytes, flops: t.flops, bound: t.byMemory >= t.byArithmetic ? "memory" : "arithmetic",
    perSequence: 1/t.seconds, tokensPerSecond: s.batch/t.seconds};
}

// ---- what is asked, and the address that holds it --------------------------------------------------------------
// name: [label, unit, smallest, largest, step, group, in which address]
const FIELDS = {
  T: ["Tokens in the cache, T", "", 1, 2**24, 1, "text"],
  batch: ["Sequences, B", "", 1, 65536, 1, "text"],
  kvBytes: ["Bytes a number", "bf16: 2, fp8: 1", 0.25, 8, "any", "text"],
  layers: ["Layers, L", "", 1, 1000, 1, "model"],
  windowed: ["of them windowed", "layers", 0, 1000, 1, "model"],
  window: ["Window, W", "tokens", 1, 2**24, 1, "model"],
  kvHeads: ["Key-value heads", "", 1, 1024, 1, "model"],
  headDim: ["Head size, D", "", 1, 4096, 1, "model"],
  heads: ["Query heads, H", "", 1, 4096, 1, "model"],
  weights: ["Weights in memory", "GB", 0, 1e5, "any", "model"],
  read: ["Weights read for a token", "GB", 0, 1e5, "any", "model"],
  active: ["Parameters a token meets", "10⁹", 0, 1e5, "any", "model"],
  memory: ["Memory", "GB", 0.001, 1e5, "any", "card"],
  bandwidth: ["Bandwidth", "TB/s", 0.001, 1e3, "any", "card"],
  tflops: ["Peak", "TFLOP/s", 0.001, 1e6, "any", "card"],
  reserve: ["Kept free", "GB", 0, 1e5, "any", "text"],
};
const of = group => Object.keys(FIELDS).filter(f => FIELDS[f][5] === group);
const round = (x, digits) => Number(x.toPrecision(digits));

// The fields of a model or of a card of the lists
function preset(group, id) {
  if (group === "card") { const c = CARDS[id]; return {memory: c.memory, bandwidth: c.bandwidth, tflops: c.tflops}; }
  const m = MODELS[id], w = weights(m);
  const {layers, windowed, window, kvHeads, headDim, heads} = m;
  return {layers, windowed, window, kvHeads, headDim, heads, weights: round(w.total/1e9, 10), read: round(w.read/1e9, 10),
          active: round(parameters(m).read/1e9, 10)};
}
const START = {model: "ours", card: "a100", T: 131072, batch: 1, kvBytes: 2, reserve: 1, ...preset("model", "ours"),
               ...preset("card", "a100")};

// Why a value is not accepted, or ""
function wrong(field, value, s) {
  const [, , low, high, step] = FIELDS[field];
  if (!Number.isFinite(value)) return "a number is needed";
  if (step === 1 && !Number.isInteger(value)) return "a whole number is needed";
  if (value < low || value > high) return `between ${low} and ${high}`;
  if (field === "windowed" && s && value > s.layers) return "not more than there are layers";
  return "";
}

// The address of a state: a model or card of the lists by name, own numbers one by one
function encode(s) {
  const q = new URLSearchParams({model: s.model});
  if (s.model === "own") for (const f of of("model")) q.set(f, s[f]);
  for (const f of of("text")) q.set(f, s[f]);
  q.set("card", s.card);
  if (s.card === "own") for (const f of of("card")) q.set(f, s[f]);
  return q.toString();
}

// The state of an address; what is missing or impossible is as at the start
function decode(query) {
  const q = new URLSearchParams(query), s = {...START};
  for (const [group, list] of [["model", MODELS], ["card", CARDS]]) {
    const id = q.get(group);
    if (id === "own") s[group] = "own";
    else if (Object.hasOwn(list, id)) Object.assign(s, {[group]: id}, preset(group, id));
  }
  for (const f of Object.keys(FIELDS)) {
    const group = FIELDS[f][5], text = q.get(f);
    if (text === null || text.trim() === "" || (group !== "text" && s[group] !== "own")) continue;
    if (!wrong(f, Number(text), s)) s[f] = Number(text);
  }
  s.windowed = Math.min(s.windowed, s.layers);
  return s;
}

// ---- words -----------------------------------------------------------------------------------------------------

function showBytes(n) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) { if (Math.abs(n) < 1024) return `${round(n, 4)} ${unit}`; n /= 1024; }
  return `${round(n, 4)} TiB`;
}
const showTokens = n => n >= 2**20 ? `${round(n/2**20, 4)}M` : n >= 1024 ? `${round(n/1024, 4)}K` : `${round(n, 4)}`;
const comma = n => n.toLocaleString("en-US", {maximumFractionDigits: 0});
const speed = n => n >= 100 ? comma(n) : `${round(n, 3)}`;

const api = {MODELS, CARDS, FIELDS, START, parameters, weights, preset, cacheBytes, reduction, largestT, step, report, wrong,
             encode, decode, showBytes, showTokens};
if (typeof module !== "undefined" && module.exports) { module.exports = api; return; }

// ---- the page --------------------------------------------------------------------------------------------------

const CSS = `
.kvc { container-type: inline-size; margin: 1rem 0; }
.kvc fieldset { border: 1px solid color-mix(in srgb, currentColor 25%, transparent); border-radius: .4rem; margin: 0 0 .8rem;
  padding: .4rem .8rem .7rem; min-width: 0; }
.kvc legend { float: none; width: auto; font-size: 1rem; font-weight: 600; margin: 0; padding: 0 .3rem; }
.kvc .kvc-grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(8rem, 1fr)); gap: .5rem .8rem; align-items: end; }
.kvc label { display: block; font-size: .85rem; line-height: 1.25; margin: 0 0 .15rem; }
.kvc input, .kvc select { width: 100%; box-sizing: border-box; font: inherit; color: inherit; background: transparent;
  border: 1px solid color-mix(in srgb, currentColor 45%, transparent); border-radius: .25rem; padding: .2rem .4rem; min-height: 2.2rem; }
.kvc option { color: #111; background: #fff; }
.kvc input[type=range] { padding: 0; border: 0; accent-color: #009E73; }
.kvc input[aria-invalid=true] { border-color: #D55E00; border-width: 2px; }
.kvc :is(input, select, button, summary, a):focus-visible { outline: 3px solid #E69F00; outline-offset: 1px; }
.kvc :is(.kvc-wrong, .kvc-small) { font-size: .8rem; margin: .4rem 0 0; }
.kvc .kvc-wrong:empty { display: none; }
.kvc .kvc-wide { grid-column: 1 / -1; }
.kvc summary { cursor: pointer; margin-bottom: .4rem; }
.kvc .kvc-scroll { overflow-x: auto; }
.kvc table { width: 100%; border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; color: inherit; }
.kvc th, .kvc td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent);
  font-weight: inherit; }
.kvc th:first-child { text-align: left; }
.kvc thead th { font-weight: 600; }
.kvc .kvc-key { display: inline-block; width: .8em; height: .8em; border-radius: .15em; margin-right: .4em; }
.kvc .kvc-sum { font-size: 1.1rem; }
.kvc button { font: inherit; color: inherit; background: transparent; border: 1px solid currentColor; border-radius: .25rem;
  padding: .25rem .7rem; min-height: 2.2rem; cursor: pointer; }
.kvc svg { display: block; width: 100%; height: auto; overflow: visible; }
.kvc svg text { fill: currentColor; font-size: 12px; }
.kvc svg .grid { stroke: currentColor; stroke-opacity: .15; }
.kvc svg path { fill: none; stroke-width: 2.2; }
${["windowed #0072B2", "global #D55E00", "mixed #009E73", "full #6B6B6B"].map(k => { const [n, c] = k.split(" ");
  return `.kvc svg .${n} { stroke: ${c}; stroke: color-mix(in srgb, ${c} 78%, currentColor); }
.kvc .kvc-key.${n} { background: ${c}; background: color-mix(in srgb, ${c} 78%, currentColor); }`; }).join("\n")}`;

const h = (tag, attrs, ...kids) => {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(attrs || {})) k === "on" ? e.addEventListener(...v) : e.setAttribute(k, v);
  e.append(...kids);
  return e;
};

function field(f) {
  const [label, unit, low, high, step] = FIELDS[f], id = `kvc-${f}`;
  return h("div", {}, h("label", {for: id}, label + (unit ? ` (${unit})` : "")),
           h("input", {id, type: "number", min: low, max: high, step, inputmode: "decimal", "aria-describedby": `${id}-wrong`}),
           h("div", {id: `${id}-wrong`, class: "kvc-wrong"}));
}

function choice(group, label, list) {
  const id = `kvc-${group}`;
  return h("div", {}, h("label", {for: id}, label), h("select", {id},
    ...Object.entries(list).map(([k, m]) => h("option", {value: k}, m.name)), h("option", {value: "own"}, "own numbers")));
}

// The curve: bytes against tokens, both in powers of two
function curve(s, r, width) {
  const W = Math.max(280, width), H = Math.round(Math.min(360, Math.max(260, W*0.5))), left = 62, right = 12, top = 14, bottom = 42;
  const lo = 7, hi = Math.max(20, Math.ceil(Math.log2(s.T)));
  const lines = [["full", "all layers global", T => cacheBytes(s, T, true)], ["global", "global layers", T => s.batch*perToken(s)*globalSlots(s, T)],
                 ["windowed", "windowed layers", T => s.batch*perToken(s)*windowedSlots(s, T)], ["mixed", "this cache", T => cacheBytes(s, T)]];
  const low = Math.floor(Math.log2(perToken(s)*s.batch*2**lo)), high = Math.ceil(Math.log2(cacheBytes(s, 2**hi, true)));
  const x = T => left + (Math.log2(T) - lo)/(hi - lo)*(W - left - right);
  const y = n => top + (high - Math.log2(n))/(high - low)*(H - top - bottom);
  const out = [];
  const text = (tx, ty, t, anchor) => out.push(`<text x="${tx.toFixed(1)}" y="${ty.toFixed(1)}" text-anchor="${anchor}">${t}</text>`);
  const every = Math.ceil((hi - lo)/(W < 420 ? 4 : 7)), bytes = Math.ceil((high - low)/6);
  for (let k = lo; k <= hi; k += every) {
    out.push(`<line class="grid" x1="${x(2**k)}" x2="${x(2**k)}" y1="${top}" y2="${H - bottom}"/>`);
    text(x(2**k), H - bottom + 16, showTokens(2**k), "middle");
  }
  for (let k = low; k <= high; k += bytes) {
    out.push(`<line class="grid" x1="${left}" x2="${W - right}" y1="${y(2**k)}" y2="${y(2**k)}"/>`);
    text(left - 6, y(2**k) + 4, showBytes(2**k), "end");
  }
  text((left + W - right)/2, H - 6, "tokens", "middle");
  for (const [kind, , f] of lines) {
    const points = [];
    for (let i = 0; i <= 130; i++) {
      const T = 2**(lo + (hi - lo)*i/130), n = f(T);
      if (n >= 2**low) points.push(`${x(T).toFixed(1)},${y(n).toFixed(1)}`);
    }
    if (points.length) out.push(`<path class="${kind}" d="M${points.join("L")}"${kind === "mixed" ? "" : ' stroke-opacity=".75"'}/>`);
  }
  if (r.room >= 2**low && r.room <= 2**high) {
    out.push(`<line x1="${left}" x2="${W - right}" y1="${y(r.room)}" y2="${y(r.room)}" stroke="currentColor" stroke-dasharray="6 4"/>`);
    text(left + 6, y(r.room) - 5, "memory left for a cache", "start");
  }
  if (s.T >= 2**lo) out.push(`<circle cx="${x(s.T)}" cy="${y(r.total)}" r="5" fill="#009E73" stroke="currentColor"/>`);
  const alt = `Cache size against tokens, both in powers of two. At ${comma(s.T)} tokens this cache takes ${showBytes(r.total)}, ` +
              `and ${showBytes(r.full)} if all layers were global.`;
  const svg = `<svg viewBox="0 0 ${W} ${H}" role="img" aria-label="${alt}">${out.join("")}</svg>`;
  const keys = lines.filter(l => l[2](s.T) > 0).map(l => `<span style="white-space:nowrap;margin-right:1em"><span class="kvc-key ${l[0]}"></span>${l[1]}</span>`);
  return `<figure style="margin:0">${svg}<figcaption>${keys.reverse().join(" ")}</figcaption></figure>`;
}

function mount(box) {
  if (!box || box.dataset.mounted) return;
  box.dataset.mounted = "yes";
  box.className = "kvc";
  const alone = !document.getElementById("jupyter-config-data"); // in JupyterLab the address is JupyterLab's
  let s = decode(alone ? location.search : "");
  const slider = h("input", {id: "kvc-slider", type: "range", min: 7, max: 20, step: 0.25, "aria-label": "Tokens in the cache, in powers of two"});
  const sum = h("p", {class: "kvc-sum", "aria-live": "polite"}), rows = h("tbody"), facts = h("ul"), figure = h("div");
  const link = h("a", {href: "?"}, "address of this result"), source = h("p", {class: "kvc-small"});
  const copy = h("button", {type: "button", on: ["click", async () => {
    try { await navigator.clipboard.writeText(link.href); copy.textContent = "copied"; }
    catch { copy.textContent = "use the link on the left"; }
    setTimeout(() => { copy.textContent = "copy it"; }, 2000);
  }]}, "copy it");
  const fields = group => of(group).map(field);
  const [T, batch, kvBytes, reserve] = fields("text");
  box.replaceChildren(h("style", {}, CSS),
    h("form", {on: ["submit", e => e.preventDefault()]},
      h("fieldset", {}, h("legend", {}, "Model and text"),
        h("div", {class: "kvc-grid"}, choice("model", "Model", MODELS), T, batch, kvBytes, h("div", {class: "kvc-wide"}, slider)), source,
        h("details", {id: "kvc-sizes"}, h("summary", {}, "its sizes, to look at or change"), h("div", {class: "kvc-grid"}, ...fields("model")))),
      h("fieldset", {}, h("legend", {}, "Machine"),
        h("div", {class: "kvc-grid"}, choice("card", "Card", CARDS), ...fields("card"), reserve))),
    sum,
    h("div", {class: "kvc-scroll"}, h("table", {}, h("thead", {}, h("tr", {}, ...["layers", "count", "tokens each", "per layer", "in all"].map(t => h("th", {scope: "col"}, t)))), rows)),
    figure, facts, h("p", {}, ...(alone ? [link, " ", copy] : [])));
  const input = f => box.querySelector(`#kvc-${f}`);

  function complain(f, why) {
    input(f).setAttribute("aria-invalid", why ? "true" : "false");
    input(`${f}-wrong`).textContent = why;
  }

  function fill() {
    for (const f of Object.keys(FIELDS)) {
      if (document.activeElement === input(f)) continue; // not while somebody types
      input(f).value = s[f];
      complain(f, "");
    }
    input("model").value = s.model;
    input("card").value = s.card;
    if (document.activeElement !== slider) slider.value = Math.log2(s.T);
    if (s.model === "own") input("sizes").open = true;
  }

  function show() {
    const r = report(s), m = MODELS[s.model], c = CARDS[s.card], global = s.layers - s.windowed;
    sum.textContent = `After ${comma(s.T)} tokens the cache takes ${showBytes(r.total)}` +
      (r.reduction > 1 ? `, ${r.reduction.toFixed(2)} times less than if all ${s.layers} layers kept everything.` :
       s.windowed ? ": the windows are not full yet, so nothing is saved." : ": every layer keeps everything.");
    rows.replaceChildren(...[["windowed", s.windowed, Math.min(s.T, s.window), r.windowed], ["global", global, s.T, r.global]]
      .filter(k => k[1]).map(([kind, n, held, bytes]) => h("tr", {}, h("th", {scope: "row"}, h("span", {class: `kvc-key ${kind}`}), kind),
        ...[comma(n), comma(held), showBytes(bytes/n), showBytes(bytes)].map(t => h("td", {}, t)))),
      h("tr", {}, h("th", {scope: "row"}, h("span", {class: "kvc-key mixed"}), "together"), ...[comma(s.layers), "", "", showBytes(r.total)].map(t => h("td", {}, t))),
      h("tr", {}, h("th", {scope: "row"}, h("span", {class: "kvc-key full"}), "if all were global"), ...[comma(s.layers), comma(s.T), showBytes(r.full/s.layers), showBytes(r.full)].map(t => h("td", {}, t))));
    const li = (...t) => h("li", {}, ...t), many = s.batch > 1 ? ` for each of ${comma(s.batch)} sequences` : "";
    facts.replaceChildren(
      li(`One token takes ${showBytes(r.perToken)} in a layer.`),
      li(r.largestT === 0 ? "Weights and reserve leave no room for a cache on this card." :
         r.largestT === Infinity ? "The cache stops growing at its window: no text is too long for this card." :
         `The card holds a cache of at most ${comma(r.largestT)} tokens${many}: ${r.fits ? "this one fits" : "this one does not fit"}` +
         ` in the ${showBytes(Math.max(0, r.room))} that weights and reserve leave` +
         (m && m.context < r.largestT ? `. The model itself is made for ${comma(m.context)}.` : ".")),
      li(`The ceiling of a decode step is ${speed(r.perSequence)} tokens/s` + (s.batch > 1 ? ` a sequence, ${speed(r.tokensPerSecond)} in all` : "") +
         `, set by ${r.bound === "memory" ? `the ${showBytes(r.nbytes)} that it reads` : `the ${round(r.flops/1e9, 4)} GFLOP that it computes`}. ` +
         "No measurement: what remains if nothing but the peaks is in the way."));
    source.replaceChildren(...(m ? ["Source of the sizes: ", h("a", {href: m.source}, m.name), ". "] : []),
                           ...(c ? ["Source of the card's numbers: ", h("a", {href: c.source}, c.name), "."] : []));
    figure.innerHTML = curve(s, r, box.clientWidth);
    if (!alone) return;
    link.href = `?${encode(s)}`;
    try { history.replaceState(null, "", `?${encode(s)}${location.hash}`); } catch { /* a page opened as a file keeps its address */ }
  }

  for (const event of ["input", "change"]) box.addEventListener(event, e => {
    const f = e.target.id.slice(4);
    if (e.target === slider) s.T = Math.round(2**Number(slider.value));
    else if (f === "model" || f === "card") { s[f] = e.target.value; if (e.target.value !== "own") Object.assign(s, preset(f, e.target.value)); }
    else if (FIELDS[f]) {
      const value = e.target.value.trim() === "" ? NaN : Number(e.target.value), why = wrong(f, value, s);
      complain(f, why);
      if (why) return;
      s[f] = value;
      if (f === "layers") s.windowed = Math.min(s.windowed, s.layers);
      const group = FIELDS[f][5];
      if (group !== "text") s[group] = "own";
    } else return;
    fill();
    show();
  });
  window.addEventListener("popstate", () => { s = decode(location.search); fill(); show(); });
  fill();
  show();
  let width = box.clientWidth;
  new ResizeObserver(() => { if (box.clientWidth !== width) { width = box.clientWidth; figure.innerHTML = curve(s, report(s), width); } }).observe(box);
}

globalThis.kvCalculator = {...api, mount};
mount(document.getElementById("kv-calculator"));
})();
