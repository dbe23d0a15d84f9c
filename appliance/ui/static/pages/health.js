// Health: the doctor's checks, what is degraded, the tiers of weights, the nodes.
import { get } from "../api.js";
import { ago, bytes, duration, number } from "../format.js";
import { t } from "../i18n.js";
import { Badge, Card, Live, Table, degradedWord, html, useLive, useState } from "../ui.js";

export function Page() {
  return html`<${Parts} /><${Doctor} /><${Tiers} /><${Nodes} />`;
}

function Parts() {
  const status = useLive((signal) => get("/admin/v1/status", signal), 2);
  return html`<${Card} title=${t("health.parts")}><${Live} of=${status}>${(now) => {
    const ill = now.devices.filter((one) => one.health !== "ok" || one.lost);
    const rows = [
      ...now.degraded.map((one) => ["bad", degradedWord(one)]),
      ...now.troubles.map((one) => ["bad", one.message || `${one.model}: ${one.reason}`]),
      ...ill.map((one) => ["bad", `${one.id}: ${one.health} ${one.health_reason || ""} ${one.lost ? one.lost.reason : ""}`]),
      ...now.notes.map((one) => ["warm", one]),
    ];
    return html`<div aria-live="polite">${rows.length ? rows.map(([shade, text]) => html`<p class=${`alert ${shade}`}>${text}</p>`) : html`<p><${Badge} state="ok" /> ${t("health.well")}</p>`}</div>`;
  }}</${Live}></${Card}>`;
}

const ORDER = ["fail", "warn", "ok", "skip"];

function Doctor() {
  const [all, setAll] = useState(false);
  const found = useLive((signal) => get("/admin/v1/doctor", signal), 60);
  return html`<${Card} title=${t("health.doctor")} aside=${html`<label class="row"><input type="checkbox" checked=${all} onChange=${() => setAll(!all)} /> ${t("health.all")}</label>`}>
    <${Live} of=${found}>${(answer) => {
      const count = (state) => answer.data.filter((one) => one.state === state).length;
      const rows = [...answer.data].filter((one) => all || one.state === "fail" || one.state === "warn").sort((a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state));
      return html`<p class="dim">${t("health.counts", { ok: number(count("ok")), skip: number(count("skip")), time: ago(answer.at_s) })}</p>
        <${Table} label=${t("health.doctor")} rows=${rows} empty=${t("health.nothing_wrong")} columns=${[
          [t("state"), (row) => html`<${Badge} state=${row.state} />`],
          [t("health.check"), (row) => row.check],
          [t("health.found"), (row) => row.found],
          [t("health.wanted"), (row) => row.wanted || "–"],
          [t("health.remedy"), (row) => row.remedy || "–"],
        ]} />`;
    }}</${Live}>
  </${Card}>`;
}

function Tiers() {
  const tiers = useLive(async (signal) => (await get("/admin/v1/tiers", signal)).data, 10);
  return html`<${Card} title=${t("health.tiers")}><${Live} of=${tiers}>${(rows) => html`<${Table} label=${t("health.tiers")} rows=${rows} rowKey=${(row) => row.name} empty="" columns=${[
    [t("name"), (row) => html`<b>${row.name}</b><br /><span class="dim">${row.where}</span>`],
    [t("models.versions"), (row) => number(row.versions), "right"],
    [t("health.snapshots"), (row) => number(row.snapshots), "right"],
    [t("models.size"), (row) => (row.limit_bytes ? t("of", { a: bytes(row.bytes), b: bytes(row.limit_bytes) }) : bytes(row.bytes)), "right"],
    [t("health.backlog"), (row) => (row.backlog ? `${number(row.backlog)} (${bytes(row.backlog_bytes)})` : "–"), "right"],
    [t("health.damaged"), (row) => (row.damaged ? html`<${Badge} state="bad">${number(row.damaged)}</${Badge}>` : "–"), "right"],
    [t("health.last_error"), (row) => (row.last_error ? `${row.last_error} (${ago(row.last_error_s)})` : "–")],
  ]} />`}</${Live}></${Card}>`;
}

function Nodes() {
  const nodes = useLive(async (signal) => (await get("/admin/v1/nodes", signal)).data, 15);
  return html`<${Card} title=${t("health.nodes")}><${Live} of=${nodes}>${(rows) => html`<${Table} label=${t("health.nodes")} rows=${rows} rowKey=${(row) => row.id} empty="" columns=${[
    [t("name"), (row) => html`<b>${row.id}</b> <span class="dim">${row.home ? t("health.home") : row.address}</span>`],
    [t("state"), (row) => html`<${Badge} state=${row.answered_s === null ? "lost" : "ok"}>${row.answered_s === null ? t("health.silent") : t("health.answers", { time: duration(row.answered_s) })}</${Badge}>`],
    [t("devices"), (row) => row.devices.join(", ")],
    [t("box.memory"), (row) => (row.answered_s === null ? bytes(row.memory_bytes) : t("health.free", { free: bytes(row.memory_available_bytes), all: bytes(row.memory_bytes) }))],
  ]} />`}</${Live}></${Card}>`;
}
