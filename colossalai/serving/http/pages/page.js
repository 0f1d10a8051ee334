"use strict";
const $ = (id) => document.getElementById(id);
let mode = "plain", busy = null, messages = [], model = null;

const headers = () => {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
};

async function loadModel() {
  try {
    const answer = await fetch("/v1/models", { headers: headers() });
    if (!answer.ok) throw new Error(await fault(answer));
    model = (await answer.json()).data[0];
    $("model").textContent = `${model.id}, ${model.max_model_len} tokens`;
    $("chat").disabled = !model.has_chat_template;
    $("chat").title = model.has_chat_template ? "" : "This model has no chat template.";
  } catch (error) {
    $("model").textContent = error.message;
  }
}

async function fault(answer) {
  try {
    const body = await answer.json();
    return body.error?.message ?? JSON.stringify(body.detail);
  } catch {
    return `${answer.status} ${answer.statusText}`;
  }
}

function choose(which) {
  mode = which;
  for (const name of ["plain", "chat"]) $(name).setAttribute("aria-selected", String(name === which));
  clear();
}

function clear() {
  messages = [];
  $("out").replaceChildren();
  $("told").textContent = "";
}

function say(who, text, kind) {
  const box = document.createElement("div"), label = document.createElement("span");
  const body = document.createElement("span");
  box.className = "said";
  label.className = "who";
  label.textContent = who;
  body.className = kind ?? "";
  body.textContent = text;
  box.append(...(who ? [label] : []), body);
  $("out").append(box);
  $("out").scrollTop = $("out").scrollHeight;
  return body;
}

function settings() {
  const number = (id) => Number($(id).value);
  const asked = { model: model?.id, stream: $("stream").checked };
  for (const id of ["max_tokens", "temperature", "top_p", "top_k", "repetition_penalty"]) asked[id] = number(id);
  if ($("seed").value !== "") asked.seed = number("seed");
  if ($("stop_text").value !== "") asked.stop = $("stop_text").value;
  if (asked.stream) asked.stream_options = { include_usage: true };
  return asked;
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function send() {
  const text = $("text").value;
  if (!text || busy) return;
  busy = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  const began = performance.now();
  const chat = mode === "chat";
  let box, usage = null, first = null, written = "";
  if (chat) {
    messages.push({ role: "user", content: text });
    say("you", text);
    $("text").value = "";
    box = say(model?.id ?? "model", "");
  } else {
    $("out").replaceChildren();
    say("", text, "prompt").parentElement.append((box = document.createElement("span")));
  }
  try {
    const body = { ...settings(), ...(chat ? { messages } : { prompt: text }) };
    const path = chat ? "/v1/chat/completions" : "/v1/completions";
    const answer = await fetch(path, {
      method: "POST", headers: headers(), body: JSON.stringify(body), signal: busy.signal,
    });
    if (!answer.ok) throw new Error(await fault(answer));
    const take = (choice) => {
      const piece = choice.text ?? choice.delta?.content ?? choice.message?.content ?? "";
      if (piece && first === null) first = performance.now() - began;
      written += piece;
      box.textContent = written;
      $("out").scrollTop = $("out").scrollHeight;
    };
    if (body.stream) {
      for await (const event of events(answer)) {
        if (event.error) throw new Error(event.error.message);
        usage = event.usage ?? usage;
        event.choices.forEach(take);
      }
    } else {
      const whole = await answer.json();
      usage = whole.usage;
      whole.choices.forEach(take);
    }
    if (chat) messages.push({ role: "assistant", content: written });
    const seconds = (performance.now() - began) / 1000, count = usage?.completion_tokens ?? 0;
    $("told").textContent =
      `${count} tokens in ${seconds.toFixed(2)} s, the first after ${((first ?? 0) / 1000).toFixed(2)} s`;
  } catch (error) {
    if (chat) messages.pop();
    if (error.name === "AbortError") $("told").textContent = "stopped";
    else say("", error.message, "bad");
  } finally {
    busy = null;
    $("send").disabled = false;
    $("stop").disabled = true;
  }
}

$("plain").onclick = () => choose("plain");
$("chat").onclick = () => choose("chat");
$("send").onclick = send;
$("stop").onclick = () => busy?.abort();
$("clear").onclick = clear;
$("key").onchange = loadModel;
$("text").onkeydown = (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
};
loadModel();
