// /openapi.json as a page: operations by tag with their parameters, bodies, examples and replies, then the schemas.

import { element } from "./charts.js";

const METHODS = ["get", "put", "post", "delete", "patch", "head", "options"];
const TAGS = {
  v1: "Predictions and models, /v1", v2: "Open Inference Protocol, /v2", health: "Health and metrics", "": "More",
};
const idOf = (method, path) => `${method}-${path}`.replace(/[^A-Za-z0-9]+/g, "-").replace(/-$/, "");
const nameOf = (ref) => ref.slice(ref.lastIndexOf("/") + 1);

/** A schema as one line of nodes; what it refers to is linked. */
function type(schema = {}) {
  if (schema.$ref) return [element("a", { href: `#schema-${nameOf(schema.$ref)}` }, nameOf(schema.$ref))];
  const several = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (several) return several.flatMap((one, i) => (i ? [schema.allOf ? " and " : " or ", ...type(one)] : type(one)));
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(", ")];
  if (schema.type === "array") return ["list of ", ...type(schema.items ?? {})];
  if (schema.type === "object" || schema.properties) {
    const names = Object.keys(schema.properties ?? {});
    return [names.length ? `{${names.join(", ")}}` : "object"];
  }
  const words = [schema.format ?? schema.contentEncoding ?? schema.type ?? "any"].flat().join(" or ");
  return [`${words}${range(schema)}`];
}

function range({ minimum, maximum, exclusiveMinimum, exclusiveMaximum }) {
  const say = (value) => (Math.abs(value) <= Number.MAX_SAFE_INTEGER ? value : `about ${value.toExponential(2)}`);
  const signs = [["≥", minimum], [">", exclusiveMinimum], ["≤", maximum], ["<", exclusiveMaximum]];
  const parts = signs.filter(([, value]) => value !== undefined).map(([sign, value]) => `${sign} ${say(value)}`);
  return parts.length ? ` ${parts.join(", ")}` : "";
}

/** Text with `code` in it. */
const marked = (text) => text.split("`").map((part, i) => (i % 2 ? element("code", {}, part) : part));

/** Each row {name, note, type, text}. */
function table(rows) {
  return element("dl", { class: "rows" }, ...rows.map(({ name, note = "", schema = null, text = "", more = [] }) => element(
    "div", {},
    element("dt", {}, name, ...(note ? [" ", element("span", { class: "fine" }, note)] : [])),
    element("dd", {}, ...(schema ? [element("span", { class: "type" }, ...type(schema))] : []),
      ...(text ? [element("div", {}, ...marked(text))] : []), ...more),
  )));
}

const said = (schema = {}) => [
  schema.description ?? "", schema.default !== undefined ? `Default ${JSON.stringify(schema.default)}.` : "",
].filter(Boolean).join(" ");

const properties = ({ properties: fields = {}, required = [] }) => Object.entries(fields).map(([name, schema]) => ({
  name, schema, note: required.includes(name) ? "required" : "", text: said(schema),
}));

/** JSON with short lists on one line. */
function pretty(value) {
  return JSON.stringify(value, null, 2).replace(/\[\s+([^[\]{}]*?)\s+\]/g, (_, inside) => `[${inside.replace(/\s+/g, " ")}]`);
}

function examplesOf({ example, examples }) {
  const all = example !== undefined ? { example: { value: example } } : examples ?? {};
  return Object.entries(all).map(([name, { value }]) => element("details", {},
    element("summary", {}, `Example: ${name}`), element("pre", { tabindex: "0" }, pretty(value))));
}

function bodies(content = {}) {
  return Object.entries(content).map(([kind, media]) => ({ name: kind, schema: media.schema, more: examplesOf(media) }));
}

function operation(method, path, about) {
  const made = element("article", { class: "card operation", id: idOf(method, path) },
    element("header", {}, element("span", { class: `method ${method}` }, method), element("code", { class: "path" }, path)),
    element("p", {}, about.summary ?? ""),
    ...(about.description ? [element("p", { class: "fine" }, about.description)] : []));
  const given = about.parameters ?? [];
  if (given.length) {
    made.append(element("h3", {}, "Parameters"), table(given.map(({ name, in: where, required, schema, description }) => ({
      name, schema, note: required ? `${where}, required` : where, text: description ?? said(schema),
    }))));
  }
  if (about.requestBody) {
    made.append(element("h3", {}, about.requestBody.required ? "Body" : "Body, may be left out"), table(bodies(about.requestBody.content)));
  }
  made.append(element("h3", {}, "Replies"), table(Object.entries(about.responses ?? {}).map(([status, reply]) => ({
    name: status, text: reply.description,
    more: bodies(reply.content).map(({ name, schema, more }) => element("div", { class: "type" },
      name, ...(schema && Object.keys(schema).length ? [": ", ...type(schema)] : []), ...more)),
  }))));
  return made;
}

function schemaCard(name, schema) {
  const several = schema.oneOf ?? schema.anyOf ?? [schema];
  const parts = several.flatMap((one, i) => {
    const rows = properties(one);
    const shown = rows.length ? table(rows) : element("p", { class: "type" }, ...type(one));
    return several.length > 1 ? [element("h3", {}, `Way ${i + 1}`), shown] : [shown];
  });
  return element("article", { class: "card operation", id: `schema-${name}` },
    element("header", {}, element("code", { class: "path schema" }, name)), ...parts);
}

function page(document_) {
  const all = Object.entries(document_.paths).flatMap(([path, item]) => METHODS.filter((method) => item[method]).map(
    (method) => ({ method, path, about: item[method], tag: item[method].tags?.[0] ?? "" })));
  const tags = [...new Set([...Object.keys(TAGS), ...all.map(({ tag }) => tag)])].filter((tag) => all.some((one) => one.tag === tag));
  const contents = element("nav", { class: "card", "aria-label": "Operations" }, element("ul", {}, ...tags.flatMap((tag) => all
    .filter((one) => one.tag === tag).map(({ method, path }) => element("li", {}, element("a", { href: `#${idOf(method, path)}` },
      element("span", { class: `method ${method}` }, method), element("span", {}, path)))))));
  const { title, version, summary = "" } = document_.info;
  const keys = document_.security ? " This server asks for an API key: send it as X-API-Key, or as Authorization: Bearer." : "";
  return [
    element("p", { class: "intro" }, `${title} ${version}. ${summary}${keys}`), contents,
    ...tags.flatMap((tag) => [
      element("h2", { id: `tag-${tag || "more"}` }, TAGS[tag] ?? tag),
      ...all.filter((one) => one.tag === tag).map(({ method, path, about }) => operation(method, path, about)),
    ]),
    element("h2", { id: "schemas" }, "Schemas"),
    ...Object.entries(document_.components?.schemas ?? {}).map(([name, schema]) => schemaCard(name, schema)),
  ];
}

try {
  const reply = await fetch("openapi.json");
  if (!reply.ok) throw new Error(`the server answered ${reply.status}`);
  document.getElementById("docs").replaceChildren(...page(await reply.json()));
  document.getElementById(location.hash.slice(1))?.scrollIntoView();
} catch (error) {
  document.getElementById("state").textContent = `openapi.json cannot be read: ${error.message}.`;
}
