// Small SVG drawings. Colours and widths come from the style sheet; text is always textContent.

const NS = "http://www.w3.org/2000/svg";

export function shape(tag, attributes = {}, text = "") {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return made;
}

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children); // strings become text nodes
  return made;
}

const at = (value) => Number(value.toFixed(3));

/** Parts side by side on 0 ... most, each {value, kind}; a part that exists can be seen. */
export function stacked(svg, parts, most) {
  let x = 0;
  svg.replaceChildren(shape("rect", { class: "track", width: 100, height: 10 }), ...parts.map(({ value, kind }) => {
    const width = value > 0 ? Math.max(0.6, (100 * value) / most) : 0;
    const made = shape("rect", { class: kind, x: at(x), width: at(Math.min(width, 100 - x)), height: 10 });
    x = Math.min(100, x + width);
    return made;
  }));
}

/** One value with its draws on low ... high. */
export function strip(svg, { mean, values, low, high, from = 0, to = 1, interval = null, bar = true }) {
  const x = (value) => at(Math.min(100, Math.max(0, (100 * (value - from)) / (to - from || 1))));
  const ticks = values.map((value) => `M${x(value)} 1.5V8.5`).join("");
  svg.replaceChildren(
    shape("rect", { class: "track", width: 100, height: 10 }),
    ...(interval ? [shape("rect", { class: "interval", x: x(interval[0]), width: at(x(interval[1]) - x(interval[0])), height: 10 })] : []),
    ...(bar ? [shape("rect", { class: "mean", width: x(mean), height: 10 })] : []),
    shape("path", { class: "draws", d: ticks }),
    shape("path", { class: "whisker", d: `M${x(low)} 5H${x(high)}M${x(low)} 3V7M${x(high)} 3V7` }),
    ...(bar ? [] : [shape("path", { class: "middle", d: `M${x(mean)} 0V10` })]),
  );
}

/** The score against its threshold on 0 ... most. */
export function gauge(svg, { score, threshold, most }) {
  const x = (value) => at((100 * Math.min(value, most)) / most);
  svg.replaceChildren(
    shape("rect", { class: "usual", width: x(threshold), height: 10 }),
    shape("rect", { class: "unusual", x: x(threshold), width: at(100 - x(threshold)), height: 10 }),
    shape("path", { class: "threshold", d: `M${x(threshold)} 0V10` }),
    shape("path", { class: "score-edge", d: `M${x(score)} 0V10` }),
    shape("path", { class: "score", d: `M${x(score)} 0V10` }),
  );
}

export function spark(svg, values) {
  const most = Math.max(...values, 1e-9);
  const x = (i) => at(values.length > 1 ? (100 * i) / (values.length - 1) : 100), y = (v) => at(22 - (20 * v) / most);
  const line = values.length > 1 ? values.map((v, i) => `${i ? "L" : "M"}${x(i)} ${y(v)}`).join("") : `M0 ${y(values[0])}H100`;
  svg.replaceChildren(shape("path", { class: "under", d: `${line}V24H0Z` }), shape("path", { class: "line", d: line }));
}

/** The running mean over k with a band of two standard errors, every draw as a dot, and where k stands. */
export function settling(svg, steps, k, say, bounds = null) {
  const width = svg.clientWidth || 400, height = svg.clientHeight || 170;
  const left = 62, right = 10, top = 10, bottom = 24; // the widest mark is "100.0 %"
  const inside = (value) => (bounds ? Math.min(bounds[1], Math.max(bounds[0], value)) : value);
  const bands = steps.map(({ mean, error }) => [inside(mean - 2 * (error || 0)), inside(mean + 2 * (error || 0))]);
  let low = Math.min(...steps.map((s) => s.value), ...bands.map((b) => b[0]));
  let high = Math.max(...steps.map((s) => s.value), ...bands.map((b) => b[1]));
  const room = Math.max(0.06 * (high - low), bounds ? 0.004 : 1e-3 * Math.abs(high) || 1e-6);
  [low, high] = [inside(low - room), inside(high + room)];
  const K = steps.length;
  const x = (i) => at(left + ((width - left - right) * i) / Math.max(1, K - 1));
  const y = (value) => at(top + (height - top - bottom) * (1 - (value - low) / (high - low || 1)));
  const path = (points) => points.map(([a, b], i) => `${i ? "L" : "M"}${a} ${b}`).join("");
  const upper = bands.map((b, i) => [x(i), y(b[1])]).slice(1), lower = bands.map((b, i) => [x(i), y(b[0])]).slice(1);
  const levels = [low, (low + high) / 2, high];
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren(
    ...levels.map((v) => shape("path", { class: "grid", d: `M${left} ${y(v)}H${width - right}` })),
    ...levels.map((v) => shape("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end" }, say(v, high - low))),
    ...(K > 2 ? [shape("path", { class: "band", d: `${path([...upper, ...lower.reverse()])}Z` })] : []),
    shape("path", { class: "dots", d: steps.map((s, i) => `M${x(i)} ${y(s.value)}h0`).join("") }),
    shape("path", { class: "later", d: path(steps.map((s, i) => [x(i), y(s.mean)])) }),
    shape("path", { class: "line", d: path(steps.slice(0, k).map((s, i) => [x(i), y(s.mean)])) }),
    shape("path", { class: "now", d: `M${x(k - 1)} ${top}V${height - bottom}` }),
    shape("circle", { class: "now-dot", cx: x(k - 1), cy: y(steps[k - 1].mean), r: 4.5 }),
    shape("text", { x: left, y: height - 6 }, "1 draw"),
    shape("text", { x: width - right, y: height - 6, "text-anchor": "end" }, `${K} draws`),
  );
}
