// Requests to the server. A refusal becomes an Error with one readable line; the key lives in this module only.

let key = "";

export const setKey = (value) => { key = value; };

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(key && { "X-API-Key": key }) };
  let reply;
  try {
    reply = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The server cannot be reached.");
  }
  const text = await reply.text();
  if (reply.ok) return text;
  let detail = "";
  try {
    detail = JSON.parse(text).detail;
  } catch { /* no problem+json, as behind a proxy */ }
  throw new Refused(reply.status, detail ? `${reply.status}: ${detail}` : `The server answered ${reply.status}.`);
}

export const models = async () => JSON.parse(await ask("v1/models")).models;

/** Bytes of the server's process, and of its device where that is another. */
export async function memory() {
  const text = await ask("metrics");
  const read = (name) => {
    const line = text.split("\n").find((one) => one.startsWith(`${name} `));
    return line ? Number(line.slice(name.length)) : null;
  };
  return {
    process: read("process_resident_memory_bytes"),
    device: read('dubito_device_memory_bytes{kind="allocated"}'),
  };
}

/** One input, {images: [base64]} or {inputs: [...]}, with `samples` draws. Seeds are text: 63 bits do not fit a number. */
export async function predict(model, input, { samples, seed = "", group = "", draws = true, signal }) {
  const fields = { ...input, samples, ...(group && { group }), return: draws ? ["probabilities", "samples"] : ["probabilities"] };
  const body = seed ? JSON.stringify(fields).replace(/}$/, `,"seed":${BigInt(seed)}}`) : JSON.stringify(fields);
  const began = performance.now();
  const text = await ask(`v1/models/${encodeURIComponent(model)}/predict`, {
    method: "POST", body, signal, headers: { "Content-Type": "application/json" },
  });
  const trip = performance.now() - began;
  const reply = JSON.parse(text);
  return { ...reply, seed: /"seed":(\d+)/.exec(text)[1], trip, prediction: reply.predictions[0] };
}
