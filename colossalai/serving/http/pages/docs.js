"use strict";
const make = (tag, text, name) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
};
let api;

const resolve = (schema) => (schema?.$ref ? api.components.schemas[schema.$ref.split("/").pop()] : schema);

function kind(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(kind).join(" | ");
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  const bounds = [];
  const walk = { minimum: ">=", exclusiveMinimum: ">", maximum: "<=", exclusiveMaximum: "<" };
  for (const [name, sign] of Object.entries(walk)) if (schema[name] !== undefined) bounds.push(`${sign} ${schema[name]}`);
  const inner = schema.items ? `${schema.type} of ${kind(schema.items)}` : (schema.type ?? "any");
  return bounds.length ? `${inner} (${bounds.join(", ")})` : inner;
}

function fields(schema) {
  const table = make("table"), head = make("tr");
  head.append(...["field", "kind", "default", ""].map((text) => make("th", text)));
  table.append(head);
  for (const [name, one] of Object.entries(schema.properties ?? {})) {
    const row = make("tr"), cell = make("td");
    cell.append(make("code", name));
    const must = schema.required?.includes(name);
    const value = must ? "required" : one.default === undefined ? "" : JSON.stringify(one.default);
    row.append(cell, make("td", kind(one)), make("td", value), make("td", one.description ?? ""));
    table.append(row);
  }
  return table;
}

function sample(schema) {
  const found = {};
  for (const [name, one] of Object.entries(schema.properties ?? {})) {
    if (one.examples) found[name] = one.examples[0];
    else if (name === "messages") found[name] = [{ role: "user", content: "Hello" }];
    else if (schema.required?.includes(name)) found[name] = "Hello";
  }
  return JSON.stringify(found, null, 2);
}

function trial(path, verb, schema) {
  const box = make("div"), button = make("button", "Try it"), out = make("pre");
  const text = schema ? make("textarea", sample(schema)) : null;
  out.hidden = true;
  if (text) {
    text.rows = 7;
    box.append(text);
  }
  button.onclick = async () => {
    const key = document.getElementById("key").value.trim();
    const headers = { ...(text ? { "Content-Type": "application/json" } : {}) };
    if (key) headers.Authorization = `Bearer ${key}`;
    out.hidden = false;
    out.textContent = "…";
    try {
      const answer = await fetch(path, { method: verb.toUpperCase(), headers, body: text?.value });
      const body = await answer.text();
      let shown = body;
      try { shown = JSON.stringify(JSON.parse(body), null, 2); } catch { /* not JSON */ }
      out.textContent = `${answer.status} ${answer.statusText}\n${shown}`;
    } catch (error) {
      out.textContent = error.message;
    }
  };
  box.append(button, out);
  return box;
}

async function load() {
  api = await (await fetch("/openapi.json")).json();
  document.getElementById("page").hidden = !api.paths["/v1/models"];
  document.getElementById("title").textContent = `${api.info.title} ${api.info.version}: ${api.info.description}`;
  for (const [path, verbs] of Object.entries(api.paths)) {
    for (const [verb, route] of Object.entries(verbs)) {
      const box = make("details"), line = make("summary");
      line.append(make("span", verb.toUpperCase(), "verb"), make("code", path), make("span", `  ${route.description ?? ""}`, "soft"));
      box.append(line);
      const schema = resolve(route.requestBody?.content?.["application/json"]?.schema);
      if (schema) box.append(fields(schema));
      if (!path.includes("{")) box.append(trial(path, verb, schema));
      document.getElementById("routes").append(box);
    }
  }
}
load();
