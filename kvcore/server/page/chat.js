"use strict";

const byId = (id) => document.getElementById(id);
let turns = []; // the messages of this chat
let running = null; // the AbortController of the answer that is coming

function show(role, text) {
  const element = document.createElement("div");
  element.className = `message ${role}`;
  element.textContent = text; // never HTML: answers may hold anything
  byId("messages").append(element);
  element.scrollIntoView({ block: "end" });
  return element;
}

function headers() {
  const key = byId("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (count >= 1024 && power < units.length - 1) {
    count /= 1024;
    power += 1;
  }
  return `${power ? count.toFixed(1) : count} ${units[power]}`;
}

function body() {
  const system = byId("system").value;
  const request = {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
    stream: true,
    stream_options: { include_usage: true },
  };
  const temperature = parseFloat(byId("temperature").value);
  const most = parseInt(byId("max-tokens").value, 10);
  if (Number.isFinite(temperature)) request.temperature = temperature;
  if (Number.isFinite(most)) request.max_tokens = most;
  return JSON.stringify(request);
}

// The data of each event of a stream; comments are left out.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const parts = buffer.split("\n\n");
    buffer = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `HTTP status ${response.status}`;
  }
}

async function answer() {
  const own = turns; // "New chat" may replace them meanwhile
  const element = show("assistant", "");
  let text = "";
  let pieces = 0;
  let first = 0;
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: headers(),
      body: body(),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await failure(response));
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) report(chunk.usage, (performance.now() - first) / 1000);
      const piece = chunk.choices[0]?.delta?.content;
      if (!piece) continue;
      const now = performance.now();
      if (!pieces) first = now;
      pieces += 1;
      text += piece;
      element.textContent = text;
      if (now > first) byId("speed").textContent = ((pieces - 1) / ((now - first) / 1000)).toFixed(1);
      element.scrollIntoView({ block: "end" });
    }
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  }
  if (text) own.push({ role: "assistant", content: text });
  else {
    element.remove();
    own.pop(); // the message that got no answer
  }
}

// The exact numbers at the end replace the live ones, which count pieces.
function report(usage, seconds) {
  byId("prompt-tokens").textContent = usage.prompt_tokens;
  byId("cached").textContent = usage.prompt_tokens_details.cached_tokens;
  if (usage.completion_tokens > 1 && seconds > 0) {
    byId("speed").textContent = ((usage.completion_tokens - 1) / seconds).toFixed(1);
  }
}

async function refresh() {
  try {
    const health = await (await fetch("/health")).json();
    byId("model").textContent = health.model ?? health.status;
    if (health.mode) byId("mode").textContent = health.mode.effective;
    if (health.kv_bytes) byId("kv-bytes").textContent = bytes(health.kv_bytes.used);
  } catch {
    byId("model").textContent = "no connection";
  }
}

async function send() {
  const input = byId("input");
  const text = input.value.trim();
  if (!text || running) return;
  input.value = "";
  turns.push({ role: "user", content: text });
  show("user", text);
  running = new AbortController();
  byId("send").hidden = true;
  byId("stop").hidden = false;
  const timer = setInterval(refresh, 500);
  await answer();
  clearInterval(timer);
  running = null;
  byId("send").hidden = false;
  byId("stop").hidden = true;
  await refresh();
  input.focus();
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
byId("stop").addEventListener("click", () => running?.abort());
byId("reset").addEventListener("click", () => {
  running?.abort();
  turns = [];
  byId("messages").replaceChildren();
});
refresh();
setInterval(refresh, 10000);
