"use strict";
// Shows /openapi.json: routes, parameters, answers. No library, no network but this server.

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function typeName(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(typeName).filter((name) => name !== "null").join(" | ");
  if (schema.type === "array") return `list of ${schema.items ? typeName(schema.items) : "any"}`;
  return schema.type || "any";
}

function fields(schema) {
  const table = element("table");
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const row = element("tr");
    const first = element("td");
    first.append(element("code", name));
    if ((schema.required || []).includes(name)) first.append(" *");
    row.append(first, element("td", typeName(field)), element("td", field.description || ""));
    table.append(row);
  }
  return table;
}

function example(path) {
  const body = path.includes("chat") ? { messages: [{ role: "user", content: "Hello" }] } : { prompt: "Once upon a time" };
  const json = JSON.stringify({ ...body, max_tokens: 32 });
  return element("pre", `curl ${location.origin}${path} \\\n  -H 'Content-Type: application/json' \\\n  -d '${json}'`);
}

function section(path, method, operation, schemas) {
  const box = element("section");
  const title = element("h2");
  title.append(element("span", method.toUpperCase() + " ", "method"), element("code", path));
  box.append(title, element("p", operation.summary));
  if (operation.requestBody) {
    const name = typeName(operation.requestBody.content["application/json"].schema);
    const more = element("details");
    more.append(element("summary", `Body: ${name} (* required)`), fields(schemas[name]));
    box.append(example(path), more);
  }
  const table = element("table");
  for (const [status, response] of Object.entries(operation.responses)) {
    const content = (response.content || {})["application/json"];
    const row = element("tr");
    row.append(element("td", status), element("td", response.description));
    row.append(element("td", content?.schema?.$ref ? typeName(content.schema) : ""));
    table.append(row);
  }
  box.append(table);
  return box;
}

async function main() {
  const api = await (await fetch("/openapi.json")).json();
  const schemas = api.components.schemas;
  const root = document.getElementById("docs");
  root.replaceChildren(element("p", `Version ${api.info.version}. ${api.info.description}`));
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) root.append(section(path, method, operation, schemas));
  }
  root.append(element("h2", "Shapes"));
  for (const [name, schema] of Object.entries(schemas)) {
    const more = element("details");
    more.append(element("summary", name), element("p", schema.description || ""), fields(schema));
    root.append(more);
  }
}

main();
