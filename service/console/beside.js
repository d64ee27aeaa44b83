// Models side by side: the same input, draws and seed, asked of every model that takes such an input.

import * as api from "./api.js";
import { element } from "./charts.js";
import { bytes, figure, milliseconds, percent } from "./words.js";

const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

/** Other models of the same task whose input has the same form. */
export function rivals(models, { name, task, input }) {
  const fits = (other) => other.name !== name && other.task === task && same(other.input.shape, input.shape)
    && (other.input.image === null) === (input.image === null) && same(other.input.columns, input.columns);
  return models.filter(fits);
}

const sum = (values) => values.reduce((a, b) => a + b, 0);

const WORDS = {
  classification: {
    heads: ["model", "answer", "doubt, nats", "of it about the weights", "prediction set", "flag", "time", "file"],
    cells: (row) => [
      `${row.label}, ${percent(row.max_probability)}`, figure(row.entropy), figure(row.mutual_information),
      row.prediction_set === null ? "not calibrated" : row.prediction_set.join(", ") || "empty",
    ],
  },
  regression: {
    heads: ["model", "answer", "doubt, variance", "of it about the weights", "interval", "flag", "time", "file"],
    cells: (row) => [
      row.mean.map(figure).join(", "), figure(sum(row.epistemic_variance) + sum(row.aleatoric_variance)),
      figure(sum(row.epistemic_variance)),
      row.interval === null ? "not calibrated" : row.interval.map(([low, high]) => `${figure(low)} to ${figure(high)}`).join("; "),
    ],
  },
};
const flagged = (ood) => (ood ? (ood.flag ? "out of distribution" : "in distribution") : "not calibrated");

function line(model, { prediction, timing_ms: timing }) {
  const cells = [...WORDS[model.task].cells(prediction), flagged(prediction.ood), milliseconds(timing.total), bytes(model.bytes.artifact)];
  const made = element("tr", { "data-model": model.name }, element("th", { scope: "row" }, model.name), ...cells.map((text) => element("td", {}, text)));
  made.children[5].className = prediction.ood ? (prediction.ood.flag ? "outside" : "inside") : "";
  return made;
}

/** Fill the table: the answer that is shown, then the others one after the other, so that none waits for another. */
export async function compare(table, models, answer, signal) {
  const { model, input, seed, samples } = answer;
  table.tHead.replaceChildren(element("tr", {}, ...WORDS[model.task].heads.map((text) => element("th", { scope: "col" }, text))));
  table.tBodies[0].replaceChildren(line(model, answer));
  const labels = [answer.prediction.label];
  for (const other of rivals(models, model)) {
    let row;
    try {
      const found = await api.predict(other.name, input, { samples: Math.min(samples, other.max_samples), seed, draws: false, signal });
      labels.push(found.prediction.label);
      row = line(other, found);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      row = element("tr", { "data-model": other.name }, element("th", { scope: "row" }, other.name), element("td", { colspan: "7" }, error.message));
    }
    if (signal.aborted) return "";
    table.tBodies[0].append(row);
  }
  if (model.task !== "classification") return "";
  const agreeing = labels.filter((label) => label === labels[0]).length;
  return `${agreeing} of ${labels.length} models that answered say ${labels[0]}. `;
}
