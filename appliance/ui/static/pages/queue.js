// Queue and batches: which job is next and why not yet, and batches with how far they are.
import { call, get, post } from "../api.js";
import { ago, moment, number } from "../format.js";
import { t } from "../i18n.js";
import { Rows } from "../rows.js";
import { Badge, Card, Failure, Live, Meter, NeedsScope, Sure, Table, html, useAct, useLive, useMay } from "../ui.js";

const ENDED = ["completed", "failed", "expired", "cancelled"];

export function Page() {
  const reads = useMay("read");
  const asks = useMay("inference");
  return html`${reads ? html`<${Waiting} />` : html`<${Card} title=${t("queue.title")}><${NeedsScope} scopes=${["read"]} /></${Card}>`}
    ${asks ? html`<${Batches} />` : html`<${Card} title=${t("batches.title")}><${NeedsScope} scopes=${["inference"]} /></${Card}>`}`;
}

function Waiting() {
  const may = useMay("admin");
  const queue = useLive((signal) => get("/admin/v1/queue", signal), 2);
  const [act, { busy, error }] = useAct(async (row, change) => {
    if (change === "pause" || change === "resume") await post(`/v1/fine_tuning/jobs/${row.id}/${change}`);
    else await call("PATCH", `/admin/v1/jobs/${row.id}`, { priority: row.priority + change });
    queue.reload();
  });
  return html`<${Card} title=${t("queue.title")}>
    <${Failure} error=${error} />
    <${Live} of=${queue}>${(answer) => html`
      <${Table} label=${t("queue.title")} rows=${answer.data} rowKey=${(row) => row.id} empty=${t("queue.none")} columns=${[
        ["#", (row) => number(row.position), "right"],
        [t("job"), (row) => html`<a href=${`#/jobs/${row.id}`}>${row.id}</a>`],
        [t("state"), (row) => html`<${Badge} state=${row.phase} />`],
        [t("devices"), (row) => row.devices.join(", ") || "–"],
        [t("queue.why"), (row) => row.message ? html`${row.reason ? html`<${Badge} state="queued">${row.reason}</${Badge}> ` : null}${row.message}` : "–"],
        [t("queue.priority"), (row) => number(row.priority), "right"],
        [t("owner"), (row) => row.owner || "–"],
        [t("queue.deadline"), (row) => (row.deadline_s ? moment(row.deadline_s) : "–"), "nowrap"],
        ...(may ? [["", (row) => html`<span class="buttons">
          <button type="button" class="small" disabled=${busy} aria-label=${t("queue.up", { id: row.id })} onClick=${() => act(row, 1)}>+</button>
          <button type="button" class="small" disabled=${busy} aria-label=${t("queue.down", { id: row.id })} onClick=${() => act(row, -1)}>−</button>
          <button type="button" class="small" disabled=${busy} onClick=${() => act(row, row.phase === "paused" ? "resume" : "pause")}>${t(row.phase === "paused" ? "job.resume" : "job.pause")}</button></span>`]] : []),
      ]} />
      ${answer.owners.length > 1 ? html`<${Table} label=${t("queue.owners")} rows=${answer.owners} empty="" columns=${[
        [t("owner"), (row) => row.owner || "box"],
        [t("state.running"), (row) => number(row.running), "right"],
        [t("queue.waiting"), (row) => number(row.waiting), "right"],
        [t("devices"), (row) => number(row.devices), "right"],
      ]} />` : null}
    `}</${Live}>
  </${Card}>`;
}

function Batches() {
  const batches = useLive((signal) => get("/v1/batches?limit=50", signal), 2);
  const [cancel, { busy, error }] = useAct(async (row) => {
    await post(`/v1/batches/${row.id}/cancel`);
    batches.reload();
  });
  return html`<${Card} title=${t("batches.title")}>
    <${Failure} error=${error} />
    <${Live} of=${batches}>${(answer) => html`<${Rows} answer=${answer} older=${(after) => `/v1/batches?limit=50&after=${after}`} empty=${t("batches.none")}
      text=${(row) => `${row.id} ${row.endpoint} ${row.status}`}>${(rows, empty) => html`<${Table} label=${t("batches.title")} rows=${rows} rowKey=${(row) => row.id} empty=${empty} columns=${[
      [t("batches.id"), (row) => html`<code>${row.id}</code><br /><span class="dim">${row.endpoint}</span>`],
      [t("state"), (row) => html`<${Badge} state=${row.status} />${faultsOf(row)}`],
      [t("batches.lines"), (row) => html`<${Meter} label=${t("batches.done")} part=${(row.request_counts.completed + row.request_counts.failed) / Math.max(1, row.request_counts.total)}
        text=${t("of", { a: number(row.request_counts.completed + row.request_counts.failed), b: number(row.request_counts.total) })} />`],
      [t("batches.failed"), (row) => number(row.request_counts.failed), "right"],
      [t("created"), (row) => ago(row.created_at), "nowrap"],
      ["", (row) => ENDED.includes(row.status) || row.status === "cancelling" ? "" : html`<${Sure} class="small" label=${t("batches.cancel")} question=${t("batches.cancel.sure")} busy=${busy} onYes=${() => cancel(row)} />`],
    ]} />`}</${Rows}>`}</${Live}>
  </${Card}>`;
}

function faultsOf(row) {
  const faults = (row.errors && row.errors.data) || [];
  return faults.slice(0, 3).map((one) => html`<br /><span class="dim">${one.line ? `${t("batches.line", { line: one.line })} ` : ""}${one.message}</span>`);
}
