// Chat: one prompt to one to four models or versions side by side, streamed, with times and the code that does the same.
import { get, streamChat } from "../api.js";
import { duration, number } from "../format.js";
import { t } from "../i18n.js";
import { Copy, Dialog, Field, Live, html, sentence, useEffect, useLive, useMay, useRef, useState } from "../ui.js";
import { codeFor } from "./chat_code.js";

const MOST = 4;

/** Names that can be called: models, and versions of those that have several. */
async function callable(signal, versions) {
  const models = (await get("/v1/models", signal)).data;
  const names = models.map((one) => one.id);
  if (!versions) return names;
  const detailed = await everyModel(signal);
  const of = new Map(detailed.map((one) => [one.name, one]));
  return names.flatMap((name) => {
    const found = of.get(name);
    if (found && found.task !== "generate") return [];
    const others = found && found.versions.length > 1 ? found.versions.map((one) => `${name}@${one.version}`) : [];
    return [name, ...others];
  });
}

async function everyModel(signal) {
  const rows = [];
  let page = { has_more: true };
  while (page.has_more) {
    const after = page.last_id ? `&after=${encodeURIComponent(page.last_id)}` : "";
    page = await get(`/admin/v1/models?limit=500${after}`, signal);
    rows.push(...page.data);
  }
  return rows;
}

export function Page({ rest }) {
  const reads = useMay("read");
  const models = useLive((signal) => callable(signal, reads), 15);
  return html`<${Live} of=${models}>${(names) => names.length ? html`<${Talk} names=${names} first=${rest[0]} />` : html`<p class="empty">${t("chat.no_models")} ${reads ? html`<a href="#/models">${t("nav.models")}</a>` : null}</p>`}</${Live}>`;
}

let serial = 0;
const column = (model) => ({ key: (serial += 1), model, turns: [] });

function Talk({ names, first }) {
  const [columns, setColumns] = useState(() => [column(first && names.includes(first) ? first : names[0])]);
  const [settings, setSettings] = useState({ system: "", temperature: "", maxTokens: "512" });
  const [prompt, setPrompt] = useState("");
  const [code, setCode] = useState(null);
  const running = useRef(new Map());
  const [busy, setBusy] = useState(0);
  useEffect(() => () => running.current.forEach((one) => one.abort()), []);

  const change = (key, how) => setColumns((before) => before.map((one) => (one.key === key ? how(one) : one)));
  const set = (name) => (event) => setSettings((before) => ({ ...before, [name]: event.target.value }));

  const bodyOf = (one, asked) => ({
    model: one.model,
    messages: [
      ...(settings.system ? [{ role: "system", content: settings.system }] : []),
      ...one.turns.filter((turn) => !turn.error).map(({ role, content }) => ({ role, content })),
      ...(asked ? [{ role: "user", content: asked }] : []),
    ],
    ...(settings.temperature === "" ? {} : { temperature: Number(settings.temperature) }),
    ...(settings.maxTokens === "" ? {} : { max_tokens: Number(settings.maxTokens) }),
  });

  const ask = async (one, asked) => {
    const stopper = new AbortController();
    running.current.set(one.key, stopper);
    const begun = performance.now();
    const turn = { role: "assistant", content: "", reasoning: "", at: "waiting" };
    const seconds = () => (performance.now() - begun) / 1000;
    const show = () => change(one.key, (now) => ({ ...now, turns: [...now.turns.slice(0, -1), { ...turn }] }));
    change(one.key, (now) => ({ ...now, turns: [...now.turns, { role: "user", content: asked }, { ...turn }] }));
    let drawn = 0;
    try {
      for await (const part of streamChat(bodyOf(one, asked), stopper.signal)) {
        if (part.head && part.head.version) turn.version = part.head.version;
        if (part.held) turn.at = "held";
        if (part.text || part.reasoning) {
          turn.firstS ??= seconds();
          turn.at = "writing";
          turn.content += part.text || "";
          turn.reasoning += part.reasoning || "";
        }
        if (part.usage) turn.usage = part.usage;
        if (part.end) turn.end = part.end;
        // Not at each token: a page that draws more often than a screen does falls behind.
        if (performance.now() - drawn > 40) {
          drawn = performance.now();
          show();
        }
      }
      turn.at = "done";
    } catch (error) {
      turn.at = error.name === "AbortError" ? "stopped" : "failed";
      if (turn.at === "failed") turn.error = sentence(error);
    }
    turn.seconds = seconds();
    running.current.delete(one.key);
    show();
    setBusy(running.current.size);
  };

  const send = (event) => {
    event.preventDefault();
    const asked = prompt.trim();
    if (!asked || busy) return;
    setPrompt("");
    columns.forEach((one) => ask(one, asked));
    setBusy(columns.length);
  };
  const keyed = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  return html`
    <details class="settings"><summary>${t("chat.settings")}</summary><div class="fields">
      <${Field} label=${t("chat.system")} class="wide"><textarea rows="2" value=${settings.system} onInput=${set("system")}></textarea></${Field}>
      <${Field} label=${t("chat.temperature")}><input type="number" min="0" max="2" step="0.1" placeholder="1" value=${settings.temperature} onInput=${set("temperature")} /></${Field}>
      <${Field} label=${t("chat.max_tokens")}><input type="number" min="1" value=${settings.maxTokens} onInput=${set("maxTokens")} /></${Field}>
    </div></details>
    <div class="columns" style=${{ "--columns": columns.length }}>
      ${columns.map((one, place) => html`<${Column} key=${one.key} one=${one} label=${labelled(columns, place)} names=${names} alone=${columns.length === 1}
        onModel=${(model) => change(one.key, (now) => ({ ...now, model, turns: [] }))}
        onClose=${() => setColumns((before) => before.filter((other) => other.key !== one.key))}
        onCode=${() => setCode(bodyOf(one, prompt.trim() || null))} busy=${busy > 0} />`)}
    </div>
    <form class="prompt" onSubmit=${send}>
      <label class="visually-hidden" for="prompt">${t("chat.prompt")}</label>
      <textarea id="prompt" rows="2" placeholder=${t("chat.placeholder")} value=${prompt} onInput=${(event) => setPrompt(event.target.value)} onKeyDown=${keyed}></textarea>
      <div class="buttons">
        ${busy ? html`<button type="button" onClick=${() => running.current.forEach((one) => one.abort())}>${t("chat.stop")}</button>`
          : html`<button class="main" disabled=${!prompt.trim()}>${t("chat.send")}</button>`}
        <button type="button" disabled=${columns.length >= MOST || busy} onClick=${() => setColumns((before) => [...before, column(names[before.length % names.length])])}>${t("chat.add")}</button>
        <button type="button" disabled=${busy} onClick=${() => setColumns((before) => before.map((one) => ({ ...one, turns: [] })))}>${t("chat.clear")}</button>
      </div>
    </form>
    ${code ? html`<${Code} body=${code} onClose=${() => setCode(null)} />` : null}`;
}

/** Of a column: its model, and which one it is where several have it, so that each has a name of its own. */
function labelled(columns, place) {
  const { model } = columns[place];
  return columns.filter((one) => one.model === model).length > 1 ? `${model} (${place + 1})` : model;
}

function Column({ one, label, names, alone, onModel, onClose, onCode, busy }) {
  const listed = names.includes(one.model) ? names : [one.model, ...names];
  const end = useRef(null);
  useEffect(() => {
    const log = end.current;
    if (log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
  });
  return html`<section class="card talk" aria-label=${label}>
    <header>
      <label class="grow"><span class="visually-hidden">${t("model")}</span>
        <select value=${one.model} disabled=${busy} onChange=${(event) => onModel(event.target.value)}>${listed.map((name) => html`<option value=${name}>${name}</option>`)}</select></label>
      <button type="button" class="small" onClick=${onCode}>${t("chat.code")}</button>
      ${alone ? null : html`<button type="button" class="plain" disabled=${busy} aria-label=${t("chat.close", { model: label })} onClick=${onClose}>✕</button>`}
    </header>
    <div class="turns" ref=${end} tabindex="0" role="log" aria-label=${t("chat.with", { model: label })}>
      ${one.turns.length ? one.turns.map((turn, place) => html`<${Turn} key=${place} turn=${turn} />`) : html`<p class="empty">${t("chat.empty")}</p>`}
    </div>
  </section>`;
}

function Turn({ turn }) {
  if (turn.role === "user") return html`<div class="turn user">${turn.content}</div>`;
  const waiting = turn.at === "waiting" || turn.at === "held";
  return html`<div class="turn assistant" data-at=${turn.at}>
    ${turn.reasoning ? html`<details class="reasoning"><summary>${t("chat.reasoning")}</summary>${turn.reasoning}</details>` : null}
    ${waiting ? html`<span class="dim" role="status">${t(turn.at === "held" ? "chat.held" : "chat.waiting")}</span>` : turn.content}
    ${turn.at === "done" && !turn.content && !turn.reasoning ? html`<span class="dim">${t("chat.nothing")}</span>` : null}
    ${turn.error ? html`<p class="alert bad" role="alert">${turn.error}</p>` : null}
    <div class="times">${timesOf(turn)}</div>
  </div>`;
}

function timesOf(turn) {
  const { usage, firstS, seconds } = turn;
  const told = [];
  if (firstS !== undefined) told.push(t("chat.first_token", { time: duration(firstS) }));
  // Of the tokens after the first: that one's time is the prompt's.
  if (usage && seconds > firstS && usage.completion_tokens > 1) told.push(t("chat.speed", { n: number((usage.completion_tokens - 1) / (seconds - firstS), 1) }));
  if (usage) told.push(t("chat.tokens", { prompt: number(usage.prompt_tokens), answer: number(usage.completion_tokens) }));
  if (turn.version) told.push(turn.version);
  if (turn.at === "stopped") told.push(t("chat.stopped"));
  if (turn.end === "length") told.push(t("chat.length"));
  return told.join(" · ");
}

function Code({ body, onClose }) {
  const [kind, setKind] = useState("python");
  const text = codeFor(kind, location.origin, body);
  return html`<${Dialog} title=${t("chat.code")} onClose=${onClose}>
    <div class="buttons" role="group" aria-label=${t("chat.code")}>
      ${["python", "javascript", "curl"].map((name) => html`<button type="button" aria-pressed=${kind === name} onClick=${() => setKind(name)}>${name}</button>`)}
      <${Copy} text=${text} />
    </div>
    <pre tabindex="0"><code>${text}</code></pre>
    <p class="dim">${t("chat.code.key")}</p>
  </${Dialog}>`;
}
