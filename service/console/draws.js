// What the first k of K draws say, computed as the server does. Natural logarithms: entropies are in nats.

const entropyOf = (p) => p.reduce((sum, q) => (q > 0 ? sum - q * Math.log(q) : sum), 0);

function quantile(sorted, q) {
  const at = q * (sorted.length - 1), low = Math.floor(at);
  return sorted[low] + (at - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
}

/** Of each column of (k, C): its values, mean, and the range that 5 to 95 % of the draws span. */
export function columns(draws) {
  return draws[0].map((_, c) => {
    const values = draws.map((row) => row[c]);
    const sorted = [...values].sort((a, b) => a - b);
    const mean = values.reduce((a, b) => a + b, 0) / values.length;
    const variance = values.reduce((sum, v) => sum + (v - mean) ** 2, 0) / values.length;
    return { values, mean, variance, low: quantile(sorted, 0.05), high: quantile(sorted, 0.95) };
  });
}

/** Probabilities and the entropy's two parts. */
export function doubt(draws) {
  const p = draws[0].map((_, c) => draws.reduce((sum, row) => sum + row[c], 0) / draws.length);
  const total = entropyOf(p);
  const data = draws.reduce((sum, row) => sum + entropyOf(row), 0) / draws.length;
  return { total, data, weights: Math.max(0, total - data) };
}

/** After each k: the running mean of one column, and the standard error of that mean (NaN for one draw). */
export function running(draws, column) {
  let mean = 0, M2 = 0;
  return draws.map((row, i) => {
    const delta = row[column] - mean;
    mean += delta / (i + 1);
    M2 += delta * (row[column] - mean);
    return { value: row[column], mean, error: i ? Math.sqrt(M2 / i / (i + 1)) : NaN };
  });
}

/** The first k from which the running mean stays within `tolerance` of where it ends. */
export function settledAt(steps, tolerance) {
  const end = steps[steps.length - 1].mean;
  let k = steps.length;
  while (k > 1 && Math.abs(steps[k - 2].mean - end) <= tolerance) k -= 1;
  return k;
}

export const leading = (p) => p.reduce((best, value, i) => (value > p[best] ? i : best), 0);
