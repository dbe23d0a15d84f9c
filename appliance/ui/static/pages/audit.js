// Audit: who changed what, the box's own decisions too; the newest first, older ones on demand.
import { get } from "../api.js";
import { moment } from "../format.js";
import { t } from "../i18n.js";
import { Badge, Card, Failure, Field, Live, Table, html, useAct, useLive, useState } from "../ui.js";

export function Audit() {
  const newest = useLive((signal) => get("/admin/v1/audit?limit=100", signal), 5, [], ["audit"]);
  const [older, setOlder] = useState([]);
  const [left, setLeft] = useState(null);
  const [text, setText] = useState("");
  const [more, { busy, error }] = useAct(async (after) => {
    const answer = await get(`/admin/v1/audit?limit=500&after=${encodeURIComponent(after)}`);
    setOlder((before) => [...before, ...answer.data]);
    setLeft(answer.has_more);
  });
  return html`<${Live} of=${newest}>${(answer) => {
    const known = new Set(answer.data.map((row) => row.id));
    const rows = [...answer.data, ...older.filter((row) => !known.has(row.id))];
    const wanted = text.toLowerCase();
    const shown = rows.filter((row) => !wanted || `${row.by} ${row.action} ${row.target} ${row.outcome} ${detailOf(row)}`.toLowerCase().includes(wanted));
    return html`<${Card}>
      <${Field} label=${t("audit.filter")}><input type="search" value=${text} onInput=${(event) => setText(event.target.value)} /></${Field}>
      <${Table} label=${t("nav.audit")} rows=${shown} rowKey=${(row) => row.id} empty=${t("audit.none")} columns=${[
        [t("timeline.when"), (row) => moment(row.created_s), "nowrap"],
        [t("audit.by"), (row) => row.by],
        [t("audit.action"), (row) => html`<code>${row.action}</code>`],
        [t("audit.target"), (row) => row.target],
        [t("audit.outcome"), (row) => html`<${Badge} state=${row.outcome} />`],
        [t("audit.detail"), (row) => html`<span class="dim">${detailOf(row)}</span>`],
      ]} />
      <${Failure} error=${error} />
      ${left ?? answer.has_more ? html`<div class="buttons"><button type="button" disabled=${busy} onClick=${() => more(rows[rows.length - 1].id)}>${t("audit.more")}</button></div>` : null}
    </${Card}>`;
  }}</${Live}>`;
}

function detailOf(row) {
  return Object.entries(row.detail || {})
    .filter(([, value]) => value !== null && value !== "")
    .map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`)
    .join(", ");
}
