// The console: one input, one request with many draws, and everything that can be seen of its answer.
// The slider looks at the first k of those draws here; what only calibration can decide about k draws (the set and the
// verdict) is asked of the server with the same seed, which gives the same draws.

import * as api from "./api.js";
import { compare, rivals } from "./beside.js";
import { element, gauge, settling, shape, spark, stacked, strip } from "./charts.js";
import { columns, doubt, leading, running, settledAt } from "./draws.js";
import { Numbers, examplesFor } from "./inputs.js";
import { withOrientation } from "./orientation.js";
import { Pad } from "./pad.js";
import { MEASURES, bytes, doubtSaid, draws as drawsSaid, figure, inDataSaid, milliseconds, percent, scaleOf } from "./words.js";

const $ = (id) => document.getElementById(id);
const ROWS = 12; // classes shown; of more, the leading ones
const KEPT = 60; // requests and readings on a sparkline
const STAGES = ["parse", "queue", "sample", "forward", "summarise", "encode"];
const BYTES = {
  artifact: "model on disk", resident: "model in memory", factors: "cached factors, of that",
  deterministic: "plain network, for comparison",
};

const state = {
  models: [], model: null, input: null, // what is sent: {images: [...]} or {inputs: [...]}
  answer: null, k: 0, decided: new Map(), // of `answer`: decisions by k
  numbers: null, latencies: [], residents: [], underway: null, comparing: null,
};

const pad = new Pad($("pad"), $("cursor"), {
  changed: ({ cleared = false } = {}) => (cleared ? forget() : drawn()),
  say: (words) => { $("pad-said").textContent = words; },
});

// ---- asking

let keyed = false; // whether a key has been tried

function complain(error) {
  if (error?.name === "AbortError") return;
  const closed = error?.status === 401;
  $("key").hidden = !closed;
  $("problem").hidden = !error || (closed && !keyed);
  $("problem").textContent = closed ? "This key is not known here." : error?.message ?? "";
  if (closed) $("key-value").focus();
  else if (error) $("problem").scrollIntoView({ block: "nearest" });
}

const later = (wait) => {
  let timer = 0;
  return (work) => {
    clearTimeout(timer);
    timer = setTimeout(work, wait);
  };
};
const soon = later(150), atRest = later(250);

async function predict() {
  if (!state.model || !state.input) return;
  const seed = $("seed").value.trim();
  if (seed && !/^\d{1,19}$/.test(seed)) {
    complain(new Error("The seed is no whole number; leave it empty for new draws each time."));
    return;
  }
  state.underway?.abort();
  const underway = state.underway = new AbortController();
  document.body.dataset.busy = "true";
  try {
    const samples = Number($("draws").value), group = $("group").value;
    const answer = await api.predict(state.model.name, state.input, { samples, seed, group, signal: underway.signal });
    Object.assign(state, { answer: { ...answer, model: state.model, input: state.input, group }, k: samples });
    state.decided = new Map([[samples, answer.prediction]]);
    complain(null);
    measured(answer);
    open();
  } catch (error) {
    if (error.name !== "AbortError") shut();
    complain(error);
  } finally {
    if (state.underway === underway) document.body.dataset.busy = "false";
  }
}

/** The set and the verdict for the first k draws: the same seed gives the same draws. */
async function decide(k) {
  const { answer, decided } = state;
  if (!answer || state.k !== k || decided.has(k)) return;
  try {
    const { seed, group } = answer;
    const found = await api.predict(answer.model.name, answer.input, { samples: k, seed, group, draws: false });
    if (state.answer !== answer || found.version !== answer.version) return;
    decided.set(k, found.prediction);
    measured(found);
    if (state.k === k) show();
  } catch (error) {
    complain(error);
  }
}

function give(input, said) {
  state.input = input;
  $("source").textContent = said;
  predict();
}

function press(button) {
  for (const one of document.querySelectorAll(".example")) one.setAttribute("aria-pressed", String(one === button));
}

function drawn() {
  press(null);
  state.input = { images: [pad.base64()] };
  $("source").textContent = "Drawn here.";
  soon(predict);
}

function shut() {
  state.answer = null;
  $("told").hidden = true;
  $("waiting").hidden = false;
  peek();
}

function forget() {
  state.underway?.abort();
  state.comparing?.abort();
  state.input = null;
  $("source").textContent = "";
  press(null);
  shut();
}

async function upload(file) {
  if (!file) return;
  press(null);
  const text = await new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error("The file cannot be read."));
    reader.readAsDataURL(file);
  });
  try { // as the server sees it, which turns it by what a camera noted if the model says so
    pad.show(await createImageBitmap(await withOrientation(file, state.model.input.image.fitting?.exif)));
  } catch { // the server says what is wrong with it
    pad.clear();
  }
  give({ images: [text.slice(text.indexOf(",") + 1)] }, `${file.name}: sent as it is, scaled by the server.`);
}

// ---- choosing a model

async function start() {
  try {
    state.models = await api.models();
  } catch (error) {
    complain(error);
    return;
  }
  complain(null);
  const chosen = $("model").value;
  $("model").replaceChildren(...state.models.map(({ name }) => element("option", { value: name }, name)));
  if (state.models.some(({ name }) => name === chosen)) $("model").value = chosen;
  if (!state.models.length) {
    complain(new Error("The server has no model that answers."));
    return;
  }
  await choose();
  poll();
}

async function choose() {
  const model = state.model = state.models.find(({ name }) => name === $("model").value);
  forget();
  const { metrics } = model;
  const known = [
    model.task, model.architecture, model.methods.join(", "), `${model.parameters.toLocaleString("en")} parameters`,
    metrics.accuracy !== undefined ? `accuracy ${percent(metrics.accuracy)}` : "",
    metrics.rmse !== undefined ? `RMSE ${figure(metrics.rmse)}` : "",
  ];
  $("about").textContent = known.filter(Boolean).join(" · ");
  besidePlain(model);
  const most = Math.max(1, model.max_samples);
  const choices = [16, 64, 256].filter((K) => K <= most);
  $("draws").replaceChildren(...(choices.length ? choices : [most]).map((K) => element("option", { value: K }, String(K))));
  $("draws").value = String(choices.includes(64) ? 64 : choices.at(-1) ?? most);
  const named = Object.keys(model.calibration?.groups ?? {});
  $("groups").hidden = !named.length;
  $("group").replaceChildren(element("option", { value: "" }, "any"), ...named.map((name) => element("option", { value: name }, name)));
  takes(model);
  remember(model.bytes);
  const groups = await examplesFor(model);
  if (state.model !== model) return;
  offer(groups);
  document.querySelector(".example[data-first]")?.click();
}

const FIGURES = { accuracy: "accuracy", rmse: "RMSE", nll: "NLL", ece: "ECE", brier: "Brier score", auroc: "AUROC" };

/** What the plain network that the model came from reaches on the same test data, where that is known. */
function besidePlain({ metrics, plain }) {
  const box = $("beside");
  box.hidden = !plain;
  if (!plain) return;
  const columns = [["this model", metrics], ["plain", plain.metrics]];
  if (plain.temperature !== null) columns.push(["plain, with a temperature", plain.tempered]);
  const show = (name, value) => value === undefined ? "" : ["accuracy", "ece"].includes(name) ? percent(value) : figure(value);
  const rows = Object.keys(FIGURES).filter((name) => plain.metrics[name] !== undefined);
  box.querySelector("thead").replaceChildren(
    element("tr", {}, element("th", {}, "on test data"), ...columns.map(([title]) => element("th", {}, title))));
  box.querySelector("tbody").replaceChildren(...rows.map((name) =>
    element("tr", {}, element("th", {}, FIGURES[name]), ...columns.map(([, values]) => element("td", {}, show(name, values[name]))))));
  box.querySelector("p").textContent = plain.verdict;
}

function takes({ input }) {
  const picture = input.image !== null;
  $("picture").hidden = !picture;
  $("numbers").hidden = picture;
  if (picture) {
    const [channels, height, width] = input.shape;
    pad.fit(width, height);
    $("ink").hidden = channels === 1;
    state.numbers = null;
  } else {
    state.numbers = new Numbers($("fields"), input.shape, input.columns);
    $("numbers-title").textContent = `Values, shape (${input.shape.join(", ")})`;
  }
}

const TITLES = { usual: "Like the training data", unusual: "Unlike it", missed: "Unlike it, but easily missed", made: "Examples" };

function offer(groups) {
  const offered = Object.entries(groups).filter(([, examples]) => examples.length);
  $("examples").replaceChildren(...offered.map(([group, examples]) => element(
    "div", { class: "group", role: "group", "aria-label": TITLES[group] },
    element("h3", {}, TITLES[group]),
    element("div", { class: "thumbs" }, ...examples.map((example) => thumb(example))),
  )));
}

function thumb(example) {
  const button = element("button", { type: "button", class: "example", "aria-pressed": "false" });
  if (example.pixel) {
    button.setAttribute("aria-label", `Example: ${example.name}`);
    if (example.first) button.dataset.first = "";
    button.title = example.name;
    const picture = element("canvas", { width: pad.width, height: pad.height });
    const small = picture.getContext("2d"), image = small.createImageData(pad.width, pad.height);
    for (let i = 0; i < pad.width * pad.height; i += 1) {
      image.data.set([...example.pixel(i % pad.width, Math.floor(i / pad.width), pad.width), 255], 4 * i);
    }
    small.putImageData(image, 0, 0);
    button.append(picture);
  } else {
    button.append(example.name);
    button.classList.add("worded");
  }
  button.addEventListener("click", () => {
    press(button);
    if (example.pixel) {
      pad.fill((x, y) => example.pixel(x, y, pad.width));
      give({ images: [pad.base64()] }, `Example: ${example.name}.`);
    } else {
      state.numbers.set(example.values());
      typed();
    }
  });
  return button;
}

function typed() {
  try {
    give({ inputs: [state.numbers.read()] }, "");
  } catch (error) {
    complain(error);
  }
}

// ---- showing

function open() {
  const { answer } = state;
  const K = answer.samples;
  $("waiting").hidden = true;
  $("told").hidden = false;
  peek();
  $("k").max = String(K);
  $("k").value = String(K);
  const { prediction, model } = answer;
  const classes = model.task === "classification";
  $("told").dataset.task = model.task;
  answer.watched = classes ? leading(prediction.probabilities) : 0;
  answer.steps = running(prediction.samples, answer.watched);
  answer.rows = classes ? shownClasses(prediction.probabilities) : prediction.mean.map((_, i) => i);
  layRows(answer, classes);
  const { seed } = answer;
  $("who").replaceChildren(
    `Answered by ${answer.model.name}, version ${answer.version}, on ${model.device}, with ${drawsSaid(K)} of seed `,
    element("code", { id: "who-seed" }, seed), ". ",
    Object.assign(element("button", { type: "button", class: "link" }, "Keep this seed"), {
      onclick: () => { $("seed").value = seed; },
    }),
  );
  show();
  sideBySide();
}

/** The other models' answers to the same input, once they are wanted. */
async function sideBySide() {
  const { answer, models } = state, others = rivals(models, answer.model);
  $("side").hidden = !others.length;
  state.comparing?.abort();
  $("side-who").textContent = `With ${others.map(({ name }) => name).join(", ")}: the same input, draws and seed.`;
  const wanted = $("side-ask").getAttribute("aria-pressed") === "true";
  $("side-box").hidden = !wanted;
  $("side-said").textContent = "";
  if (!wanted || !others.length) return;
  const comparing = state.comparing = new AbortController();
  try {
    const said = await compare($("side-table"), models, answer, comparing.signal);
    if (state.comparing === comparing && !comparing.signal.aborted) $("side-said").textContent = `${said}Times are the server's, files as stored.`;
  } catch (error) {
    complain(error);
  }
}

function shownClasses(p) {
  const all = p.map((_, i) => i);
  return all.length <= ROWS ? all : all.sort((a, b) => p[b] - p[a]).slice(0, ROWS);
}

const targetOf = (model, i) => model.targets?.[i] ?? `output ${i + 1}`;
const nameOf = (model, i) => model.labels?.[i] ?? String(i);

function layRows({ rows, model }, classes) {
  const held = model.calibration ? `, made to hold ${percent(model.calibration.coverage, 0)}` : "";
  $("bars-title").textContent = classes ? "Class probabilities" : "Values";
  $("bars-said").textContent = classes
    ? "Bar: mean over the draws. Fine ticks: each draw. Line: 5 to 95 % of them."
    : `Shade: interval${held}. Mark: mean. Fine ticks: each draw. Line: 5 to 95 % of them.`;
  $("bars").replaceChildren(...rows.map((i) => {
    const name = classes ? nameOf(model, i) : targetOf(model, i);
    return element("div", { class: "class-row", "data-index": i },
      element("span", { class: "class-name", title: name }, name),
      shape("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" }),
      element("span", { class: "class-value" }), element("span", { class: "class-spread" }));
  }));
  const left = (model.labels?.length ?? 0) - rows.length;
  $("bars-rest").textContent = classes && left > 0 ? `${left} more classes are less probable than these.` : "";
}

/** Everything for the first k draws. */
function show() {
  const { answer, k } = state;
  const used = answer.prediction.samples.slice(0, k), found = columns(used);
  const decision = state.decided.get(k);
  document.body.dataset.deciding = String(!decision);
  $("verdict").setAttribute("aria-busy", String(!decision)); // one announcement, once it is decided
  if (!decision) atRest(() => decide(k));
  $("k-said").textContent = `${drawsSaid(k)}`;
  $("k").setAttribute("aria-valuetext", drawsSaid(k));
  if (answer.model.task === "classification") showClasses(answer, used, found, decision);
  else showValues(answer, found, decision);
  $("in-data-said").textContent = inDataSaid(answer.model.task, decision?.ood);
  if (decision) showOod(answer, decision.ood);
  $("peek").replaceChildren(...["label", "chance", "flag"].map((id) => element("span", {}, $(id).textContent)));
}

function showClasses(answer, used, found, decision) {
  const means = found.map(({ mean }) => mean), first = leading(means), C = means.length;
  const { model, steps, watched } = answer, k = used.length;
  $("label").textContent = nameOf(model, first);
  $("chance").textContent = percent(means[first]);
  for (const row of $("bars").children) {
    const i = Number(row.dataset.index), one = found[i];
    row.classList.toggle("first", i === first);
    strip(row.querySelector("svg"), one);
    row.querySelector(".class-value").textContent = percent(one.mean);
    row.querySelector(".class-spread").textContent = `${(100 * one.low).toFixed(0)} – ${(100 * one.high).toFixed(0)}`;
  }
  const parts = doubt(used);
  showSplit(parts, Math.log(C), `${figure(Math.log(C))} nats: no idea`, (value) => `${figure(value)} nats`, doubtSaid(parts, C));
  settling($("settle"), steps, k, (v, span) => `${(100 * v).toFixed(span < 0.05 ? 1 : 0)} %`, [0, 1]);
  const { mean, error } = steps[k - 1];
  const band = error >= 2.5e-4 ? ` ± ${(200 * error).toFixed(1)}` : "";
  $("settle-said").textContent =
    `Probability of ${nameOf(model, watched)} after ${drawsSaid(k)}: ${band ? `${(100 * mean).toFixed(1)}${band} %` : percent(mean)}. `
    + `It stays within one point of its last value from ${drawsSaid(settledAt(steps, 0.01))} on. `
    + "Dots: single draws; band: two standard errors.";
  $("set-row").hidden = false;
  if (decision) showSet(decision.prediction_set, answer);
}

function showSet(set, { model, group }) {
  $("set").replaceChildren(...(set ?? []).slice(0, 40).map((name) => element("li", {}, name)));
  const { coverage, classes, groups } = model.calibration ?? {};
  const held = groups?.[group] ?? (classes ? Math.min(...classes) : coverage);
  const whose = groups?.[group] !== undefined ? `of group ${group}` : classes ? "of each class" : "like the training data";
  $("set-said").textContent = set === null
    ? "Not calibrated: there is none."
    : `${set.length ? "" : "Empty: no class is probable enough. "}Made to hold the true class for ${percent(held, 0)} of inputs ${whose}.`;
}

function showValues(answer, found, decision) {
  const { prediction, steps } = answer, k = state.k;
  const noise = prediction.aleatoric_variance;
  $("label").textContent = found.map(({ mean }) => figure(mean)).join(", ");
  $("chance").textContent = decision?.interval
    ? decision.interval.map(([low, high]) => `${figure(low)} to ${figure(high)}`).join("; ") : "";
  for (const row of $("bars").children) {
    const i = Number(row.dataset.index), one = found[i], interval = decision?.interval?.[i] ?? null;
    const reach = 3 * Math.sqrt(prediction.epistemic_variance[i] + noise[i]) || 1;
    const from = prediction.mean[i] - 1.2 * reach, to = prediction.mean[i] + 1.2 * reach;
    strip(row.querySelector("svg"), { ...one, from, to, interval, bar: false });
    row.querySelector(".class-value").textContent = figure(one.mean);
    row.querySelector(".class-spread").textContent = interval ? `${figure(interval[0])} – ${figure(interval[1])}` : "";
  }
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const parts = { data: sum(noise), weights: sum(found.map(({ variance }) => variance)) };
  const total = parts.data + parts.weights;
  const share = percent(parts.weights / total, 0);
  showSplit(parts, total, `variance ${figure(total)}`, figure, `${share} of the variance is about the weights.`);
  settling($("settle"), steps, k, figure);
  const { mean, error } = steps[k - 1];
  $("settle-said").textContent = `Mean of ${targetOf(answer.model, 0)} after ${drawsSaid(k)}: ${figure(mean)}`
    + `${Number.isNaN(error) ? "" : ` ± ${figure(2 * error)}`}. Dots: single draws; band: two standard errors.`;
  $("set-row").hidden = true;
}

function showSplit(parts, most, mostSaid, say, words) {
  stacked($("split"), [{ value: parts.data, kind: "in-data" }, { value: parts.weights, kind: "in-weights" }], most);
  $("split-most").textContent = mostSaid;
  $("in-data").textContent = say(parts.data);
  $("in-weights").textContent = say(parts.weights);
  $("split-said").textContent = words;
}

function showOod({ model }, ood) {
  const flag = $("flag");
  $("gauge-box").hidden = !ood;
  if (!ood) {
    flag.dataset.flag = "";
    flag.textContent = "Not calibrated";
    $("why").textContent = "This model has no threshold: nothing says whether the input is like its training data.";
    $("gauge-said").textContent = "No threshold is known.";
    $("gauge-fine").textContent = "";
    return;
  }
  const { score, threshold } = ood;
  flag.dataset.flag = String(ood.flag);
  flag.textContent = ood.flag ? "Out of distribution" : "In distribution";
  $("why").textContent = ood.flag
    ? "Unlike what the model was trained on: do not rely on this answer." : "By this score, like what the model was trained on.";
  const { least, most } = scaleOf(ood.measure, model.labels?.length ?? 2, score, threshold);
  gauge($("gauge"), { score: score - least, threshold: threshold - least, most: most - least });
  const at = (100 * (threshold - least)) / (most - least);
  $("at-threshold").style.left = `clamp(4.5rem, ${at}%, 100% - 6rem)`; // clear of the scale's ends
  $("at-threshold").textContent = `threshold ${figure(threshold)}`;
  $("gauge-least").textContent = figure(least);
  $("gauge-most").textContent = figure(most);
  $("gauge-said").textContent = `Score ${figure(score)}, ${ood.flag ? "above" : "not above"} the threshold ${figure(threshold)}.`;
  const rate = model.calibration ? ` It flags ${percent(model.calibration.false_positive_rate, 0)} of inputs like the training data.` : "";
  $("gauge-fine").textContent = `Score: ${MEASURES[ood.measure] ?? ood.measure}. Threshold calibrated at ${drawsSaid(ood.samples)}.${rate}`;
}

// ---- latency and memory

function measured({ timing_ms: timing, trip }) {
  state.latencies = [...state.latencies, timing.total].slice(-KEPT);
  $("total").textContent = milliseconds(timing.total);
  $("trip").textContent = milliseconds(trip);
  const parts = STAGES.filter((stage) => stage in timing);
  stacked($("stages"), parts.map((stage) => ({ value: timing[stage], kind: `stage-${stage}` })), timing.total || 1);
  $("stage-list").replaceChildren(...parts.map((stage) => element("li", {},
    element("span", { class: `swatch stage-${stage}` }), element("span", {}, stage), element("b", {}, milliseconds(timing[stage])))));
  spark($("latencies"), state.latencies);
  const n = state.latencies.length;
  $("latency-said").textContent = n === 1 ? "First request of this page." : `Last ${n} requests of this page, at most ${milliseconds(Math.max(...state.latencies))}.`;
}

function remember(sizes) {
  $("bytes").replaceChildren(...Object.entries(BYTES).filter(([name]) => name in sizes).map(([name, said]) => element(
    "div", {}, element("dt", {}, said), element("dd", {}, bytes(sizes[name])))));
}

let polling = 0;

/** Gently: every ten seconds while somebody looks. */
async function poll() {
  clearTimeout(polling);
  if (!document.hidden) {
    try {
      const { process, device } = await api.memory();
      const apart = device !== null && state.model.device !== "cpu", here = apart ? device : process;
      $("whose").textContent = apart ? `on ${state.model.device}` : "the server's process";
      if (here !== null) {
        state.residents = [...state.residents, here].slice(-KEPT);
        $("process").textContent = bytes(here);
        spark($("residents"), state.residents);
      }
    } catch { /* it may be closed to us: then there is nothing to show */ }
  }
  polling = setTimeout(poll, 10_000);
}

// ---- hands

$("model").addEventListener("change", choose);
$("group").addEventListener("change", () => predict());
$("predict").addEventListener("click", () => (state.numbers ? typed() : predict()));
$("numbers").addEventListener("submit", (event) => { event.preventDefault(); typed(); });
$("fields").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.matches("input")) { event.preventDefault(); typed(); }
});
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  api.setKey($("key-value").value);
  keyed = true;
  $("key-value").value = "";
  start();
});
$("file").addEventListener("change", () => { upload($("file").files[0]).catch(complain); $("file").value = ""; });
$("clear").addEventListener("click", () => { pad.clear(); forget(); });
$("erase").addEventListener("click", () => pad.toggle());
$("pad").addEventListener("mode", () => $("erase").setAttribute("aria-pressed", String(pad.erasing)));
$("ink").addEventListener("input", () => {
  pad.ink = [1, 3, 5].map((i) => parseInt($("ink").value.slice(i, i + 2), 16));
});
$("side-ask").addEventListener("click", () => {
  $("side-ask").setAttribute("aria-pressed", String($("side-ask").getAttribute("aria-pressed") !== "true"));
  sideBySide();
});
$("k").addEventListener("input", () => { stop(); state.k = Number($("k").value); show(); });

for (const kind of ["dragenter", "dragover"]) {
  document.addEventListener(kind, (event) => { event.preventDefault(); $("drop").dataset.over = "true"; });
}
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("drop").dataset.over = "false"; });
document.addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop").dataset.over = "false";
  if (state.model?.input.image) upload(event.dataTransfer.files[0]).catch(complain);
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && state.model) poll(); });
let width = 0;
new ResizeObserver(() => {
  if ($("settle").clientWidth === width) return;
  width = $("settle").clientWidth;
  requestAnimationFrame(() => { if (state.answer) show(); });
}).observe($("answer"));

let inView = false;
const peek = () => { $("peek").hidden = inView || !state.answer; }; // on a small screen the answer is below the input
new IntersectionObserver(([seen]) => { inView = seen.isIntersecting; peek(); }).observe($("verdict"));

let playing = 0;
const stop = () => { cancelAnimationFrame(playing); playing = 0; $("play").textContent = "Replay"; };
$("play").addEventListener("click", () => {
  if (playing) { stop(); return; }
  const { answer } = state, began = performance.now(), K = answer.samples;
  $("play").textContent = "Stop";
  const step = (now) => {
    if (state.answer !== answer) { stop(); return; }
    const passed = Math.max(0, now - began); // a frame may have begun before the click
    const k = Math.min(K, 1 + Math.floor((passed / 2000) * K));
    if (k !== state.k) {
      state.k = k;
      $("k").value = String(k);
      show();
    }
    if (k < K) playing = requestAnimationFrame(step);
    else stop();
  };
  playing = requestAnimationFrame(step);
});

start();
