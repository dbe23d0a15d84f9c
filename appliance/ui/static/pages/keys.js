// Keys and usage: who spent what, for an administrator also the keys themselves.
import { call, get, loginId, post } from "../api.js";
import { ago, browser, moment, number } from "../format.js";
import { t } from "../i18n.js";
import { Badge, Card, Copy, Dialog, Facts, Failure, Field, Live, Sure, Table, Who, html, useAct, useContext, useLive, useMay, useState } from "../ui.js";

const SPANS = { 3600: "1 h", 86400: "24 h", 604800: "7 d", 2592000: "30 d" };
const BY = ["key", "owner", "model", "version", "hour"];
const SCOPES = ["inference", "fine_tuning", "read", "metrics", "admin"];

export function Page() {
  const may = useMay("admin");
  return html`<${Own} /><${Logins} all=${may} /><${Usage} />${may ? html`<${List} />` : null}`;
}

function Own() {
  const who = useContext(Who);
  return html`<${Card} title=${t("keys.own", { name: who.name })}><${Facts} pairs=${[
    [t("keys.scopes"), who.scopes.join(", ")],
    [t("owner"), who.owner],
    [t("keys.models"), who.models ? who.models.join(", ") : t("keys.all_models")],
    [t("keys.limits"), limitsOf(who)],
    [t("created"), who.created_s ? moment(who.created_s) : null],
    [t("keys.expires"), who.expires_s ? moment(who.expires_s) : null],
  ]} /></${Card}>`;
}

function Logins({ all }) {
  const logins = useLive(async (signal) => (await get("/admin/v1/sessions", signal)).data, 15);
  const [end, { busy, error }] = useAct(async (row) => {
    await call("DELETE", `/admin/v1/sessions/${row.id}`);
    logins.reload();
  });
  const columns = [
    [t("keys.login"), (row) => html`<span title=${row.agent}>${browser(row.agent || "–")}</span>`],
    [t("keys.key"), (row) => row.key],
    [t("created"), (row) => ago(row.created_s), "nowrap"],
    [t("keys.login.until"), (row) => moment(row.until_s), "nowrap"],
    ["", (row) => row.id === loginId() ? html`<${Badge} state="running">${t("keys.login.this")}</${Badge}>` : html`<button type="button" class="small" disabled=${busy} onClick=${() => end(row)}>${t("keys.login.end")}</button>`],
  ];
  return html`<${Card} title=${all ? t("keys.logins.all") : t("keys.logins")}>
    <${Failure} error=${error} />
    <${Live} of=${logins}>${(rows) => html`<${Table} label=${t("keys.logins")} rows=${rows} rowKey=${(row) => row.id} empty="" columns=${columns} />`}</${Live}>
  </${Card}>`;
}

function limitsOf(key) {
  const told = [];
  if (key.requests_per_minute) told.push(t("keys.requests_per_minute", { n: number(key.requests_per_minute) }));
  if (key.tokens_per_minute) told.push(t("keys.tokens_per_minute", { n: number(key.tokens_per_minute) }));
  if (key.tokens_per_day) told.push(t("keys.tokens_per_day", { n: number(key.tokens_per_day) }));
  if (key.tokens_per_month) told.push(t("keys.tokens_per_month", { n: number(key.tokens_per_month) }));
  return told.join(", ") || t("keys.no_limits");
}

function Usage() {
  const [by, setBy] = useState("key");
  const [span, setSpan] = useState(86400);
  const usage = useLive((signal) => get(`/admin/v1/usage?by=${by}&since_s=${Math.floor(Date.now() / 1000 - span)}`, signal), 5, [by, span]);
  return html`<${Card} title=${t("usage.title")} aside=${html`
      <label><span class="visually-hidden">${t("usage.by")}</span><select value=${by} onChange=${(event) => setBy(event.target.value)}>${BY.map((name) => html`<option value=${name}>${t(`usage.by.${name}`)}</option>`)}</select></label>
      <button type="button" class="small" disabled=${!usage.data || !usage.data.data.length} onClick=${() => download(`usage-by-${by}.csv`, csvOf(usage.data.data))}>${t("usage.download")}</button>
      <div class="buttons" role="group" aria-label=${t("timeline.span")}>${Object.entries(SPANS).map(([seconds, name]) => html`<button type="button" class="small" aria-pressed=${span === Number(seconds)} onClick=${() => setSpan(Number(seconds))}>${name}</button>`)}</div>`}>
    <${Live} of=${usage}>${(answer) => html`<${Table} label=${t("usage.title")} rows=${answer.data} rowKey=${(row) => row.name} empty=${t("usage.none")} columns=${[
      [t(`usage.by.${by}`), (row) => (by === "hour" && Number(row.name) ? moment(Number(row.name)) : row.name || "–")],
      [t("engine.requests"), (row) => number(row.requests), "right"],
      [t("usage.prompt"), (row) => number(row.prompt_tokens), "right"],
      [t("usage.answer"), (row) => number(row.completion_tokens), "right"],
      [t("canary.errors"), (row) => number(row.errors), "right"],
      [t("usage.refused"), (row) => number(row.refused), "right"],
      [t("usage.device_hours"), (row) => number(row.device_hours, 2), "right"],
    ]} />`}</${Live}>
  </${Card}>`;
}

const FIELDS = ["name", "requests", "prompt_tokens", "completion_tokens", "errors", "refused", "device_hours"];

/** As a table for other programs: a cell that a spreadsheet would take for a formula begins with an apostrophe. */
function csvOf(rows) {
  const cell = (value) => {
    const text = String(value ?? "");
    const safe = typeof value !== "number" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\n\r]/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe;
  };
  return [FIELDS, ...rows.map((row) => FIELDS.map((name) => row[name]))].map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  URL.revokeObjectURL(url);
}

function List() {
  const keys = useLive(async (signal) => (await get("/admin/v1/keys", signal)).data, 2);
  const [making, setMaking] = useState(false);
  const [made, setMade] = useState(null);
  const [revoke, { busy, error }] = useAct(async (row) => {
    await call("DELETE", `/admin/v1/keys/${row.id}`);
    keys.reload();
  });
  const columns = [
    [t("name"), (row) => html`<b>${row.name}</b><br /><code>${row.prefix}…</code>`],
    [t("keys.scopes"), (row) => row.scopes.join(", ")],
    [t("owner"), (row) => row.owner],
    [t("keys.models"), (row) => (row.models ? row.models.join(", ") : t("keys.all_models"))],
    [t("keys.limits"), (row) => limitsOf(row)],
    [t("created"), (row) => ago(row.created_s), "nowrap"],
    [t("keys.asked"), (row) => (row.last_asked_s ? ago(row.last_asked_s) : "–"), "nowrap"],
    [t("keys.expires"), (row) => (row.expires_s ? moment(row.expires_s) : "–"), "nowrap"],
    ["", (row) => row.revoked_s ? html`<${Badge} state="revoked">${t("keys.revoked")}</${Badge}>` : html`<${Sure} class="small" label=${t("keys.revoke")} question=${t("keys.revoke.sure", { name: row.name })} busy=${busy} onYes=${() => revoke(row)} />`],
  ];
  return html`<${Card} title=${t("keys.all")} aside=${html`<button type="button" onClick=${() => setMaking(true)}>${t("keys.new")}</button>`}>
    <${Failure} error=${error} />
    ${making ? html`<${NewKey} onMade=${(key) => { setMaking(false); setMade(key); keys.reload(); }} onClose=${() => setMaking(false)} />` : null}
    <${Live} of=${keys}>${(rows) => html`<${Table} label=${t("keys.all")} rows=${[...rows].sort((a, b) => Boolean(a.revoked_s) - Boolean(b.revoked_s))} rowKey=${(row) => row.id} empty="" columns=${columns} />`}</${Live}>
    ${made ? html`<${Dialog} title=${t("keys.made", { name: made.name })} onClose=${() => setMade(null)}>
      <p>${t("keys.made.what")}</p><pre tabindex="0"><code>${made.key}</code></pre><div class="buttons"><${Copy} text=${made.key} /></div></${Dialog}>` : null}
  </${Card}>`;
}

function NewKey({ onMade, onClose }) {
  const [form, setForm] = useState({ name: "", owner: "", rpm: "", tpd: "", days: "", scopes: ["inference"] });
  const set = (name) => (event) => setForm((before) => ({ ...before, [name]: event.target.value }));
  const tick = (scope) => () => setForm((before) => ({ ...before, scopes: before.scopes.includes(scope) ? before.scopes.filter((one) => one !== scope) : [...before.scopes, scope] }));
  const [make, { busy, error }] = useAct(async () => {
    const body = { name: form.name, scopes: form.scopes };
    if (form.owner) body.owner = form.owner;
    if (form.rpm) body.requests_per_minute = Number(form.rpm);
    if (form.tpd) body.tokens_per_day = Number(form.tpd);
    if (form.days) body.expires_s = Date.now() / 1000 + Number(form.days) * 86400;
    onMade(await post("/admin/v1/keys", body));
  });
  return html`<form class="plan" onSubmit=${(event) => { event.preventDefault(); make(); }}>
    <div class="fields">
      <${Field} label=${t("name")}><input required maxlength="64" value=${form.name} onInput=${set("name")} /></${Field}>
      <${Field} label=${t("owner")} hint=${t("keys.owner.what")}><input maxlength="64" value=${form.owner} onInput=${set("owner")} /></${Field}>
      <${Field} label=${t("keys.rpm")}><input type="number" min="1" value=${form.rpm} onInput=${set("rpm")} /></${Field}>
      <${Field} label=${t("keys.tpd")}><input type="number" min="1" value=${form.tpd} onInput=${set("tpd")} /></${Field}>
      <${Field} label=${t("keys.days")} hint=${t("keys.days.what")}><input type="number" min="1" max="36500" value=${form.days} onInput=${set("days")} /></${Field}>
    </div>
    <fieldset class="ticks"><legend>${t("keys.scopes")}</legend>${SCOPES.map((scope) => html`<label class="choice"><input type="checkbox" checked=${form.scopes.includes(scope)} onChange=${tick(scope)} /><span><b>${scope}</b><small>${t(`scope.${scope}`)}</small></span></label>`)}</fieldset>
    <div class="buttons"><button class="main" disabled=${busy || !form.scopes.length}>${t("keys.make")}</button><button type="button" onClick=${onClose}>${t("cancel")}</button></div>
    <${Failure} error=${error} />
  </form>`;
}
