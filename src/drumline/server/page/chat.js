"use strict";
// A chat with the server that this page came from. Texts are put in as text, never as HTML.

const $ = (id) => document.getElementById(id);
let history = [];
let running = null;
let ready = false;

function headers() {
  const key = $("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

function show(kind, text) {
  const box = document.createElement("div");
  box.className = `message ${kind}`;
  const body = document.createElement("p");
  body.textContent = text;
  const meta = document.createElement("div");
  meta.className = "meta";
  box.append(body, meta);
  $("log").append(box);
  scroll(true);
  return { box, body, meta };
}

function scroll(always) {
  const log = $("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

function settings() {
  const found = {};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if ($(name).value !== "") found[name] = Number($(name).value);
  }
  return found;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      if (part === "data: [DONE]") return;
      yield JSON.parse(part.slice(6));
    }
  }
}

async function errorText(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `HTTP ${response.status}`;
  }
}

function rates(began, first, last, tokens) {
  const parts = [`first token ${Math.round(first - began)} ms`];
  if (tokens > 1 && last > first) parts.push(`${((tokens - 1) * 1000 / (last - first)).toFixed(1)} tokens/s`);
  parts.push(`${tokens} tokens`);
  return parts.join(" · ");
}

async function answer() {
  const chat = history;
  const system = $("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...history];
  const { box, body, meta } = show("assistant", "");
  const began = performance.now();
  let first = 0, last = 0, tokens = 0, text = "", note = "";
  running = new AbortController();
  busy(true);
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), signal: running.signal,
      body: JSON.stringify({
        model: $("model").value || undefined, messages, stream: true, ...settings(),
        stream_options: { include_usage: true, continuous_usage_stats: true },
      }),
    });
    if (!response.ok) throw new Error(await errorText(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage && event.usage.completion_tokens > tokens) {
        tokens = event.usage.completion_tokens;
        last = performance.now();
        first = first || last;
        meta.textContent = rates(began, first, last, tokens);
      }
      const choice = event.choices[0];
      if (choice && choice.delta.content) {
        text += choice.delta.content;
        body.append(choice.delta.content);
        scroll(false);
      }
      if (choice && choice.finish_reason === "length") note = " · cut off at the token limit";
    }
  } catch (error) {
    if (error.name === "AbortError") {
      note = " · stopped";
    } else {
      const line = document.createElement("p");
      line.className = "error";
      line.textContent = error.message;
      box.insertBefore(line, meta);
    }
  } finally {
    running = null;
    busy(false);
  }
  if (first) meta.textContent = rates(began, first, last, tokens) + note;
  if (text) chat.push({ role: "assistant", content: text });
  else chat.pop();
}

function busy(yes) {
  $("stop").hidden = !yes;
  $("send").hidden = yes;
  if (!yes) $("text").focus();
}

function send() {
  const text = $("text").value.trim();
  if (!text || running || !ready) return;
  $("text").value = "";
  show("user", text);
  history.push({ role: "user", content: text });
  answer();
}

async function models() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (!response.ok) {
    $("state").textContent = await errorText(response);
    return;
  }
  const names = (await response.json()).data.map((entry) => entry.id);
  $("model").replaceChildren(...names.map((name) => new Option(name, name)));
  $("state").textContent = "";
  serves(true);
}

// Before the server can answer, what was written waits in its box.
function serves(yes) {
  ready = yes;
  $("send").disabled = !yes;
}

async function watch() {
  for (;;) {
    try {
      const state = await (await fetch("/startupz")).json();
      if (state.status === "ready") return models();
      const slow = state.processes.slice(1).filter((row) => row.phase !== "ready");
      const shown = slow.map((row) => `${row.name} ${row.phase}`).join(" · ");
      $("state").textContent = state.message || `${state.phase} (${Math.round(state.seconds)} s) ${shown}`;
    } catch {
      $("state").textContent = "no answer from the server";
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
$("stop").addEventListener("click", () => { if (running) running.abort(); });
$("clear").addEventListener("click", () => {
  if (running) running.abort();
  history = [];
  $("log").replaceChildren();
  $("text").focus();
});
$("key").addEventListener("change", models);
serves(false);
watch();
