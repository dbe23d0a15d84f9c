// Models: what there is, their versions, and a canary with its verdict; promote and roll back.
import { call, get, post } from "../api.js";
import { ago, bytes, duration, number, percent } from "../format.js";
import { t } from "../i18n.js";
import { Rows } from "../rows.js";
import { Badge, Card, Facts, Failure, Field, Live, Sure, Table, html, useAct, useLive, useMay, useState } from "../ui.js";
import { AddModel } from "./add_model.js";

/** A model's name within a URL's path: it may have slashes. */
const inPath = (name) => name.split("/").map(encodeURIComponent).join("/");

export function Page({ rest }) {
  return rest.length ? html`<${Model} key=${rest.join("/")} name=${rest.join("/")} />` : html`<${List} />`;
}

function List() {
  const models = useLive((signal) => get("/admin/v1/models", signal), 2);
  const adds = useMay("admin");
  return html`<${Live} of=${models}>${(answer) => html`
  ${adds ? html`<${AddModel} empty=${!answer.data.length} onDone=${models.reload} />` : null}
  <${Card}><${Rows} answer=${answer} older=${(after) => `/admin/v1/models?after=${encodeURIComponent(after)}`} empty=${t("models.none")}
    text=${(row) => [row.name, row.base, row.arch, row.owner, row.state, row.active_version].join(" ")}>${(rows, empty) => html`<${Table} label=${t("nav.models")} rows=${rows} rowKey=${(row) => row.name} empty=${empty} columns=${[
    [t("name"), (row) => html`<a href=${`#/models/${encodeURIComponent(row.name)}`}>${row.name}</a>${row.base ? html`<br /><span class="dim">${row.base}</span>` : null}`],
    [t("state"), (row) => html`<${Badge} state=${row.state} />${row.message ? html`<br /><span class="dim">${row.message}</span>` : null}`],
    [t("models.active"), (row) => row.active_version || "–", "nowrap"],
    [t("models.versions"), (row) => number(row.versions.length), "right"],
    [t("models.params"), (row) => sized(row.params), "right"],
    [t("models.size"), (row) => bytes(row.bytes), "right"],
    [t("models.context"), (row) => number(row.max_model_len), "right"],
    [t("owner"), (row) => row.owner || "–"],
  ]} />`}</${Rows}></${Card}>`}</${Live}>`;
}

function sized(params) {
  if (!params) return "–";
  return params >= 1e9 ? `${number(params / 1e9, 1)} B` : `${number(params / 1e6, params < 1e7 ? 1 : 0)} M`;
}

function Model({ name }) {
  const model = useLive((signal) => get(`/admin/v1/models/${inPath(name)}`, signal), 2, [name]);
  return html`<p class="back"><a href="#/models">← ${t("models.all")}</a></p>
    <${Live} of=${model}>${(one) => html`
      <${About} one=${one} />
      ${one.canary ? html`<${Canary} one=${one} canary=${one.canary} onChange=${model.reload} />` : null}
      <${Versions} one=${one} onChange=${model.reload} />
    `}</${Live}>`;
}

function About({ one }) {
  return html`<${Card} title=${one.name} aside=${html`<${Badge} state=${one.state} />`}>
    ${one.message ? html`<p class="alert bad">${one.message}</p>` : null}
    ${one.context_note ? html`<p class="alert quiet">${one.context_note}</p>` : null}
    <${Facts} pairs=${[
      [t("models.active"), one.active_version],
      [t("models.canary"), one.canary_version],
      [t("models.arch"), one.arch],
      [t("models.params"), sized(one.params)],
      [t("models.size"), bytes(one.bytes)],
      [t("models.context"), number(one.max_model_len)],
      [t("models.base"), one.base],
      [t("models.source"), one.source],
      [t("models.job"), one.job_id ? html`<a href=${`#/jobs/${one.job_id}`}>${one.job_id}</a>` : null],
      [t("models.adapter"), one.adapter ? t("models.adapter.of", { base: one.adapter.base, rank: one.adapter.rank }) : null],
      [t("owner"), one.owner],
      [t("models.shared"), one.shared_with.length ? one.shared_with.join(", ").replace("*", t("everybody")) : null],
      [t("models.replicas"), one.deployment ? `${one.deployment.min_replicas} – ${one.deployment.max_replicas ?? t("any")}` : null],
    ]} />
    <div class="buttons"><a class="button" href=${`#/chat/${encodeURIComponent(one.name)}`}>${t("job.try")}</a></div>
  </${Card}>`;
}

function Versions({ one, onChange }) {
  const may = useMay("admin");
  const [chosen, setChosen] = useState(null);
  const [back, { busy, error }] = useAct(async (version) => {
    await post(`/admin/v1/models/${inPath(one.name)}/rollback`, { version });
    onChange();
  });
  const compares = one.canary && one.canary.state === "running";
  const rows = [...one.versions].sort((a, b) => b.created_s - a.created_s);
  return html`<${Card} title=${t("models.versions")}>
    <${Failure} error=${error} />
    <${Table} label=${t("models.versions")} rows=${rows} rowKey=${(row) => row.version} empty="" columns=${[
      [t("models.version"), (row) => html`<b>${row.version}</b> ${row.version === one.active_version ? html`<${Badge} state="open">${t("models.answers")}</${Badge}>` : null}`],
      [t("created"), (row) => ago(row.created_s), "nowrap"],
      [t("models.size"), (row) => bytes(row.bytes), "right"],
      [t("models.source"), (row) => row.source],
      [t("models.where"), (row) => row.tiers.join(", ") || "–"],
      ...(may ? [["", (row) => html`<span class="buttons">
        ${row.version === one.active_version || compares ? null : html`
          <button type="button" class="small" onClick=${() => setChosen(row.version)}>${t("models.canary")}</button>
          <${Sure} class="small" label=${t("models.serve")} question=${t("models.serve.sure", { version: row.version })} busy=${busy} onYes=${() => back(row.version)} />`}
      </span>`]] : []),
    ]} />
    ${chosen && !compares ? html`<${Begin} key=${chosen} name=${one.name} version=${chosen} onDone=${() => { setChosen(null); onChange(); }} onClose=${() => setChosen(null)} />` : null}
  </${Card}>`;
}

function Begin({ name, version, onDone, onClose }) {
  const [form, setForm] = useState({ share: "10", minutes: "10", requests: "50", auto: true });
  const set = (field) => (event) => setForm((before) => ({ ...before, [field]: event.target.type === "checkbox" ? event.target.checked : event.target.value }));
  const [begin, { busy, error }] = useAct(async () => {
    const body = { version, share: Number(form.share) / 100, watch_s: 60 * Number(form.minutes), min_requests: Number(form.requests), auto: form.auto };
    await call("PUT", `/admin/v1/models/${inPath(name)}/canary`, body);
    onDone();
  });
  return html`<form class="plan" onSubmit=${(event) => { event.preventDefault(); begin(); }}>
    <h3>${t("canary.begin", { version })}</h3>
    <div class="fields">
      <${Field} label=${t("canary.share")}><input type="number" min="1" max="90" required value=${form.share} onInput=${set("share")} /></${Field}>
      <${Field} label=${t("canary.minutes")}><input type="number" min="1" required value=${form.minutes} onInput=${set("minutes")} /></${Field}>
      <${Field} label=${t("canary.requests")}><input type="number" min="1" required value=${form.requests} onInput=${set("requests")} /></${Field}>
    </div>
    <label class="row"><input type="checkbox" checked=${form.auto} onChange=${set("auto")} /> ${t("canary.auto")}</label>
    <div class="buttons"><button class="main" disabled=${busy}>${t("canary.do")}</button><button type="button" onClick=${onClose}>${t("cancel")}</button></div>
    <${Failure} error=${error} />
  </form>`;
}

function Canary({ one, canary, onChange }) {
  const may = useMay("admin");
  const runs = canary.state === "running";
  const [act, { busy, error }] = useAct(async (how) => {
    const path = `/admin/v1/models/${inPath(one.name)}`;
    await post(`${path}/${how}`);
    onChange();
  });
  const rows = Object.entries(canary.versions || {});
  return html`<${Card} title=${t("canary.title")} aside=${html`<${Badge} state=${canary.state} />`}>
    <p>${t("canary.what", { version: canary.version, before: canary.before, share: percent(canary.share) })}</p>
    <p class="alert quiet" role="status">${canary.decision ? t("canary.decision", canary.decision) : canary.reason || ""}</p>
    <${Table} label=${t("canary.title")} rows=${rows} rowKey=${([version]) => version} empty="" columns=${[
      [t("models.version"), ([version]) => html`<b>${version}</b>`],
      [t("engine.requests"), ([, side]) => number(side.requests), "right"],
      [t("canary.errors"), ([, side]) => number(side.errors), "right"],
      [t("canary.first"), ([, side]) => duration(side.first_byte_p95_s), "right"],
      [t("canary.whole"), ([, side]) => duration(side.duration_p95_s), "right"],
    ]} />
    ${may && runs ? html`<div class="buttons">
      <${Sure} class="main" label=${t("canary.promote")} question=${t("canary.promote.sure", { version: canary.version })} busy=${busy} onYes=${() => act("promote")} />
      <button type="button" disabled=${busy} onClick=${() => act("rollback")}>${t("canary.back")}</button>
    </div><${Failure} error=${error} />` : null}
  </${Card}>`;
}
