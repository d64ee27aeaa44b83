// An exported model in the browser: onnxruntime-web, a file from disk, no request after the page has loaded.

import { withOrientation } from "./orientation.js";

const RUNTIME = "./wasm/ort.wasm.bundle.min.mjs"; // put there at set-up; not part of the repository
const BINARY = "console/wasm/ort-wasm-simd-threaded.wasm";
const LUMINANCE = [0.299, 0.587, 0.114]; // of red, green and blue (ITU-R BT.601)

const $ = (id) => document.getElementById(id);
const say = (text) => { $("state").textContent = text; };
let ort = null;
let model = null; // {session, facts}
let chosen = null; // file with a picture
let picture = null; // {width, height, data: RGBA}

function wrong(error) {
  $("problem").textContent = error === null ? "" : error.message;
  $("problem").hidden = error === null;
}

/** What an action says is wrong appears on the page; what was wrong before disappears. */
const careful = (action) => async (...given) => {
  try {
    wrong(null);
    await action(...given);
  } catch (error) {
    wrong(error);
  }
  $("predict").disabled = !(model && picture);
};

async function start() {
  const missing = "This server was set up without onnxruntime-web: `make wasm` fetches it (needs npm).";
  const reply = await fetch(BINARY);
  if (!reply.ok) throw new Error(missing);
  ort = await import(RUNTIME);
  ort.env.wasm.wasmBinary = await reply.arrayBuffer();
  ort.env.wasm.numThreads = 1; // more would need a page that is isolated from all others
  say("Ready: choose a model and a picture. The network is no longer needed.");
}

/** The file's facts: in the protocol-buffer format a model's field 14 is a pair of key (1) and value (2). */
export function factsOf(bytes) {
  for (const [field, pair] of fields(bytes)) {
    if (field !== 14) continue;
    const parts = Object.fromEntries([...fields(pair)].map(([n, text]) => [n, new TextDecoder().decode(text)]));
    if (parts[1] === "dubito") return checked(parts[2]);
  }
  throw new Error("This file was not written by dubito export: it says nothing of itself.");
}

function checked(text) {
  let facts = null;
  try {
    facts = JSON.parse(text);
  } catch {} // said below
  if (facts?.format === undefined) throw new Error("This file was not written by dubito export: it says nothing of itself.");
  if (![1, 2].includes(facts.format)) throw new Error(`The file has format ${facts.format}; this page reads the formats 1 and 2. Export it again.`);
  if (!Array.isArray(facts.input?.shape) || !Number.isInteger(facts.samples) || !Array.isArray(facts.methods)) {
    throw new Error("This file is damaged: what it says of itself makes no sense. Export it again.");
  }
  return facts;
}

function* fields(bytes) {
  let at = 0;
  const number = () => {
    let value = 0;
    for (let scale = 1; ; scale *= 128) {
      if (at >= bytes.length) throw new Error("This file is cut or damaged, or no ONNX model.");
      const byte = bytes[at++];
      value += (byte & 127) * scale;
      if (byte < 128) return value;
    }
  };
  while (at < bytes.length) {
    const tag = number();
    const kind = tag % 8;
    if (kind === 0) number();
    else if (kind === 1) at += 8;
    else if (kind === 5) at += 4;
    else if (kind === 2) {
      const length = number();
      if (at + length > bytes.length) throw new Error("This file is cut or damaged, or no ONNX model.");
      yield [Math.floor(tag / 8), bytes.subarray(at, at + length)];
      at += length;
    } else throw new Error("This file is cut or damaged, or no ONNX model.");
  }
}

async function open(file) {
  model = null;
  const bytes = new Uint8Array(await file.arrayBuffer());
  const facts = factsOf(bytes);
  if (facts.input.mean === null) throw new Error("This model takes numbers, not pictures; this page has pictures only.");
  let session;
  try {
    session = await ort.InferenceSession.create(bytes, { executionProviders: ["wasm"], logSeverityLevel: 4 });
  } catch (error) {
    throw new Error(`The model cannot be loaded: ${error.message}`);
  }
  const entries = [facts.input.takes === "image" ? "image" : "input", ...(facts.random ? ["seed"] : [])];
  if (session.inputNames.join() !== entries.join()) {
    throw new Error(`This file is damaged: its graph does not take what it says (${entries.join(", ")}). Export it again.`);
  }
  model = { session, facts };
  if (chosen) await look(chosen);
  say(`${file.name}: ${facts.architecture}, ${facts.methods.join(", ")}, K = ${facts.samples}, ${facts.precision}.`);
}

/** Decode a picture, turned by its EXIF orientation if the model says so. */
async function look(file) {
  chosen = picture = null;
  const shown = await withOrientation(file, model?.facts.input.fitting?.exif);
  let image;
  try {
    image = await createImageBitmap(shown, { colorSpaceConversion: "none", premultiplyAlpha: "none" });
  } catch {
    throw new Error(`${file.name} is no picture that this browser can read.`);
  }
  const { width, height } = image;
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  chosen = file;
  picture = { width, height, data: context.getImageData(0, 0, width, height).data };
}

/** Channels last, as many as the model takes. */
function pixels(channels) {
  const { data, width, height } = picture;
  const out = new Uint8Array(width * height * channels);
  for (let i = 0; i < width * height; i++) {
    const rgb = [data[4 * i], data[4 * i + 1], data[4 * i + 2]];
    const grey = Math.round(rgb.reduce((sum, v, c) => sum + LUMINANCE[c] * v, 0));
    for (let c = 0; c < channels; c++) out[i * channels + c] = channels === 3 ? rgb[c] : grey;
  }
  return out;
}

function input({ takes, shape, mean, std, fitting }) {
  const [channels, height, width] = shape;
  const raw = pixels(channels);
  if (takes === "image") {
    return { image: new ort.Tensor("uint8", raw, [1, picture.height, picture.width, channels]) };
  }
  const cut = fitting?.resize ? `, cut out of ${fitting.resize}` : "";
  if (picture.height !== height || picture.width !== width || cut) {
    throw new Error(`The picture has ${picture.height} × ${picture.width} pixels; this file takes ${height} × ${width}${cut}. Export the model with --image to have pictures resized.`);
  }
  const x = new Float32Array(raw.length);
  for (let i = 0; i < height * width; i++) {
    for (let c = 0; c < channels; c++) x[c * height * width + i] = (raw[i * channels + c] / 255 - mean[c]) / std[c];
  }
  return { input: new ort.Tensor("float32", x, [1, ...shape]) };
}

async function predict() {
  const { session, facts } = model;
  const typed = $("seed").value.trim();
  if (typed && !(/^\d+$/.test(typed) && BigInt(typed) < 2n ** 63n)) {
    throw new Error(`The seed is ${typed}; expected a whole number from 0 to 2^63 - 1.`);
  }
  const seed = typed ? BigInt(typed) : BigInt(Math.floor(Math.random() * 2 ** 53));
  const feeds = input(facts.input);
  if (facts.random) feeds.seed = new ort.Tensor("int64", BigInt64Array.of(seed), []);
  const began = performance.now();
  const out = await session.run(feeds);
  show(facts, out, seed, performance.now() - began);
}

function show(facts, out, seed, time) {
  const name = (i) => facts.labels?.[i] ?? String(i);
  const rows = [];
  if (out.probabilities) {
    const p = Array.from(out.probabilities.data);
    const best = p.indexOf(Math.max(...p));
    $("label").textContent = name(best);
    $("chance").textContent = `${(100 * p[best]).toFixed(1)} %`;
    for (const key of ["entropy", "expected_entropy", "mutual_information"]) rows.push([key, out[key].data[0].toFixed(4)]);
    p.forEach((value, i) => rows.push([name(i), value.toFixed(6)]));
    const fits = out.prediction_set && p.map((_, i) => i).filter((i) => out.prediction_set.data[i]).map(name);
    $("set").textContent = fits ? `Prediction set: ${fits.join(", ") || "none fits"}` : "";
  } else {
    $("label").textContent = Array.from(out.mean.data, (v) => v.toPrecision(4)).join(", ");
    $("chance").textContent = "";
    for (const key of ["epistemic_variance", "aleatoric_variance"]) rows.push([key, Array.from(out[key].data).join(", ")]);
    $("set").textContent = out.interval ? `Interval: ${Array.from(out.interval.data, (v) => v.toPrecision(4)).join(" to ")}` : "";
  }
  const unlike = out.ood ? Boolean(out.ood.data[0]) : null;
  $("flag").dataset.flag = unlike === null ? "" : String(unlike);
  $("flag").textContent = unlike === null ? "Not calibrated" : unlike ? "Out of distribution" : "In distribution";
  $("numbers").replaceChildren(...rows.flatMap(([key, value]) => {
    const [term, told] = [document.createElement("dt"), document.createElement("dd")];
    term.textContent = key.replaceAll("_", " ");
    told.textContent = value;
    told.dataset.of = key;
    return [term, told];
  }));
  $("how").textContent = `${time.toFixed(1)} ms in this browser, seed ${seed}`;
  $("told").hidden = false;
}

$("model").addEventListener("change", careful(async (event) => { if (event.target.files[0]) await open(event.target.files[0]); }));
$("picture").addEventListener("change", careful(async (event) => { if (event.target.files[0]) await look(event.target.files[0]); }));
$("predict").addEventListener("click", careful(predict));
careful(start)();
