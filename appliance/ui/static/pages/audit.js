// Audit: who changed what, the box's own decisions too; the newest first, older ones on demand.
import { get } from "../api.js";
import { browser, moment } from "../format.js";
import { t } from "../i18n.js";
import { Rows } from "../rows.js";
import { Badge, Card, Live, Table, html, useLive } from "../ui.js";

export function Page() {
  const newest = useLive((signal) => get("/admin/v1/audit?limit=100", signal), 2);
  return html`<${Live} of=${newest}>${(answer) => html`<${Card}>
    <${Rows} answer=${answer} older=${(after) => `/admin/v1/audit?limit=500&after=${encodeURIComponent(after)}`} empty=${t("audit.none")}
      text=${(row) => `${row.by} ${row.action} ${row.target} ${row.outcome} ${detailOf(row)}`}>${(rows, empty) => html`
      <${Table} label=${t("nav.audit")} rows=${rows} rowKey=${(row) => row.id} empty=${empty} columns=${[
        [t("timeline.when"), (row) => moment(row.created_s), "nowrap"],
        [t("audit.by"), (row) => row.by],
        [t("audit.action"), (row) => html`<code>${row.action}</code>`],
        [t("audit.target"), (row) => row.target, "wrap"],
        [t("audit.outcome"), (row) => html`<${Badge} state=${row.outcome} />`],
        [t("audit.detail"), (row) => html`<span class="dim">${detailOf(row)}</span>`, "wrap"],
      ]} />`}</${Rows}>
  </${Card}>`}</${Live}>`;
}

function detailOf(row) {
  return Object.entries(row.detail || {})
    .filter(([, value]) => value !== null && value !== "")
    .map(([name, value]) => `${name} ${detailWord(name, value)}`)
    .join(", ");
}

function detailWord(name, value) {
  if (name === "agent") return browser(String(value));
  if (Array.isArray(value) && value.every((one) => typeof one === "string")) return value.join("+");
  return typeof value === "object" ? JSON.stringify(value) : value;
}
