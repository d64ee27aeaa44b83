// Numbers and verdicts in words.

export function percent(p, digits = 1) {
  const rounded = (100 * p).toFixed(digits);
  if (p > 0 && Number(rounded) === 0) return `<${(10 ** -digits).toFixed(digits)} %`;
  if (p < 1 && Number(rounded) === 100) return `>${(100 - 10 ** -digits).toFixed(digits)} %`;
  return `${rounded} %`;
}

export function figure(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(1).replace("e+", "e").replaceAll("-", "−");
  const text = size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  return text.replace("-", "−");
}

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${unit && count < 100 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

export const milliseconds = (value) => `${value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : Math.round(value)} ms`;

export const draws = (k) => (k === 1 ? "1 draw" : `${k} draws`);

export const MEASURES = {
  entropy: "entropy, all doubt together",
  mutual_information: "mutual information, the doubt about the weights",
  max_probability: "one minus the leading probability",
  epistemic_variance: "variance over the draws, relative to the noise",
  energy: "energy of the logits",
  knn: "distance of the features to those of the training data",
};

/** The largest value that a measure can take among C classes. */
function mostOf(measure, C) {
  if (measure === "max_probability") return 1 - 1 / C;
  return measure === "entropy" || measure === "mutual_information" ? Math.log(C) : Infinity;
}

/** The ends of a scale for a score and its threshold. An energy has no zero: its scale lies around the two. */
export function scaleOf(measure, C, score, threshold) {
  if (measure === "energy") {
    const reach = Math.max(1, 2 * Math.abs(score - threshold));
    return { least: threshold - reach, most: threshold + reach };
  }
  return { least: 0, most: Math.min(mostOf(measure, C), Math.max(3 * threshold, 1.1 * score)) || 1 };
}

/** What doubt in the data means. For an input unlike the training data nobody can say what more data would do. */
export function inDataSaid(task, ood) {
  const what = task === "classification" ? "Every draw is unsure by itself" : "Noise of the targets themselves";
  if (ood?.flag) return `${what}. This input is unlike the training data, so it is not known whether more data would help.`;
  return `${what}: for inputs like the training data, more of it would not help.`;
}

export function doubtSaid({ total, weights }, C) {
  const share = total / Math.log(C);
  if (share < 0.05) return "Hardly any doubt.";
  const much = share < 0.25 ? "Some doubt" : share < 0.6 ? "Much doubt" : "Close to no idea";
  if (weights > 0.5 * total) return `${much}, most of it about the weights.`;
  if (weights > 0.15 * total) return `${much}, mostly in the data, partly about the weights.`;
  return `${much}, nearly all of it in the data.`;
}
