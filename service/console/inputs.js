// What can be given to a model: examples for pictures, number fields or a list for everything else.

import { element } from "./charts.js";

const FIELDS = 32; // more numbers than this are one text
const size = (shape) => shape.reduce((a, b) => a * b, 1);

let shipped = null;

/** Examples that come with the console, for a model of just this input and these labels; else generated ones. */
export async function examplesFor(model) {
  if (!model.input.image) return { made: numbersFor(size(model.input.shape)) };
  shipped ??= await (await fetch("console/examples.json")).json();
  const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
  const found = shipped.find(({ shape, labels }) => same(model.input.shape, shape) && same(model.labels, labels));
  if (!found) return { made: pictures() };
  const of = (group) => found.examples.filter((one) => one.group === group).map(({ name, pixels }) => ({
    name,
    first: name === found.first,
    pixel: (x, y) => Array(3).fill(Math.round((255 * pixels[found.shape[2] * y + x]) / found.levels)),
  }));
  return { usual: of("in"), unusual: of("out"), missed: of("missed") };
}

function pictures() {
  const grey = (v) => [v, v, v];
  return [
    { name: "noise", pixel: () => grey(Math.floor(256 * Math.random())) },
    { name: "black", pixel: () => grey(0) },
    { name: "white", pixel: () => grey(255) },
    { name: "stripes", pixel: (x, y, width) => grey(Math.floor(y / Math.max(1, width / 8)) % 2 ? 255 : 0) },
    { name: "gradient", pixel: (x, y, width) => grey(Math.round((255 * x) / Math.max(1, width - 1))) },
  ];
}

function numbersFor(n) {
  const normal = () => Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
  const round = (value) => Number(value.toFixed(3));
  return [
    { name: "zeros", values: () => Array(n).fill(0) },
    { name: "random", values: () => Array.from({ length: n }, () => round(normal())) },
    { name: "far away", values: () => Array.from({ length: n }, () => round(10 * normal())) },
  ];
}

/** Fields for the numbers of one input; `read` gives them nested as the shape says, or throws what is wrong. */
export class Numbers {
  constructor(box, shape, columns = null) {
    this.shape = shape;
    this.n = size(shape);
    this.nameOf = (i) => columns?.[i] ?? `Value ${i + 1}`;
    if (this.n <= FIELDS) {
      this.fields = Array.from({ length: this.n }, (_, i) => element("input", {
        type: "number", step: "any", value: "0", required: "", "aria-label": this.nameOf(i),
      }));
      box.replaceChildren(...(columns
        ? this.fields.map((field, i) => element("label", { class: "column" }, element("span", {}, columns[i]), field))
        : this.fields));
    } else {
      this.text = element("textarea", { rows: "6", "aria-label": `${this.n} numbers`, spellcheck: "false" });
      box.replaceChildren(this.text);
    }
  }

  set(values) {
    if (this.text) this.text.value = values.join(", ");
    else this.fields.forEach((field, i) => { field.value = String(values[i]); });
  }

  read() {
    const words = this.text ? this.text.value.split(/[\s,;[\]]+/).filter(Boolean) : this.fields.map((field) => field.value);
    const values = words.map((word) => (word === "" ? NaN : Number(word)));
    const wrong = values.findIndex((value) => !Number.isFinite(value));
    if (wrong >= 0) throw new Error(`${this.nameOf(wrong)} is no number.`);
    if (values.length !== this.n) throw new Error(`${values.length} numbers are there; this model takes ${this.n}.`);
    return this.shape.slice(1).reduceRight((flat, width) => {
      const rows = [];
      for (let i = 0; i < flat.length; i += width) rows.push(flat.slice(i, i + width));
      return rows;
    }, values);
  }
}
