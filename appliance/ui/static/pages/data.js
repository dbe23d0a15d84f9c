// Data: files of training data and what their check found, in numbers and by line.
import { get, post } from "../api.js";
import { ago, bytes, number, percent } from "../format.js";
import { t } from "../i18n.js";
import { Rows } from "../rows.js";
import { Badge, Card, Facts, Failure, Live, Table, html, useAct, useLive, useState } from "../ui.js";

const CHECKS = ["bad_lines", "empty", "duplicates", "near_duplicates", "too_long", "contaminated", "personal_data"];
const LENGTHS = ["shortest", "p5", "p50", "p95", "p99", "longest"];
const LINES = 200;

export function Page({ rest }) {
  return rest.length ? html`<${File} key=${rest[0]} id=${rest[0]} />` : html`<${List} />`;
}

const word = (check) => (CHECKS.includes(check) ? t(`check.${check}`) : check);
const named = (counts) => Object.entries(counts || {}).map(([name, n]) => `${name} ${number(n)}`).join(", ");

function List() {
  const path = "/v1/files?purpose=fine-tune&limit=200";
  const files = useLive((signal) => get(path, signal), 2);
  return html`<${Live} of=${files}>${(answer) => html`<${Card}>
    <${Rows} answer=${answer} older=${(after) => `${path}&after=${after}`} empty=${t("data.none")} text=${(row) => `${row.filename} ${row.id} ${row.status}`}>${(rows, empty) => html`
    <${Table} label=${t("nav.data")} rows=${rows} rowKey=${(row) => row.id} empty=${empty} columns=${[
      [t("data.file"), (row) => html`<a href=${`#/data/${row.id}`}>${row.filename}</a><br /><code>${row.id}</code>`],
      [t("models.size"), (row) => bytes(row.bytes), "right"],
      [t("created"), (row) => ago(row.created_at), "nowrap"],
      [t("state"), (row) => html`<${Badge} state=${row.status === "error" ? "error" : "ok"}>${row.status}</${Badge}>`],
    ]} />`}</${Rows}>
  </${Card}>`}</${Live}>`;
}

function File({ id }) {
  const shown = useLive((signal) => get(`/v1/files/${id}`, signal), 30, [id]);
  const [report, setReport] = useState(null);
  const [check, { busy, error }] = useAct(async () => setReport(await post(`/v1/files/${id}/check`, {})));
  return html`<p class="back"><a href="#/data">← ${t("data.all")}</a></p>
    <${Live} of=${shown}>${(one) => html`<${Card} title=${one.filename} aside=${html`<button type="button" disabled=${busy} onClick=${check}>${busy ? t("data.checking") : t("data.check")}</button>`}>
      <${Failure} error=${error} />
      ${one.status_details ? html`<p class="alert bad">${one.status_details}</p>` : null}
      <${Facts} pairs=${[[t("data.file"), html`<code>${one.id}</code>`], [t("models.size"), bytes(one.bytes)], [t("created"), ago(one.created_at)], [t("owner"), one.owner]]} />
    </${Card}>
    ${report ? html`<${Report} report=${report} />` : html`<p class="alert quiet" role="status">${t("data.unchecked")}</p>`}`}</${Live}>`;
}

function Report({ report }) {
  const { tokens, lengths } = report;
  const rows = Object.entries(report.checks);
  const lines = rows.flatMap(([name, of]) => of.first.map((one) => ({ name, one }))).sort((a, b) => a.one.line - b.one.line).slice(0, LINES);
  return html`<${Card} title=${t("data.report")} aside=${html`<${Badge} state=${report.usable ? "ok" : "failed"}>${t(report.usable ? "data.usable" : "data.unusable")}</${Badge}>`}>
      <${Facts} pairs=${[
        [t("plan.examples"), number(report.examples)],
        [t("plan.tokens"), tokens.exact ? number(tokens.total) : t("data.about", { n: number(tokens.total) })],
        [t("data.shape"), report.file.shape || "–"],
        ...LENGTHS.filter((name) => name in lengths).map((name) => [t(`length.${name}`), number(lengths[name])]),
        [t("data.left_out"), named(report.keys_left_out)],
      ]} />
    </${Card}>
    <${Card} title=${t("data.checks")}>
      <${Table} label=${t("data.checks")} rows=${rows} rowKey=${([name]) => name} empty="" columns=${[
        [t("data.check.name"), ([name]) => word(name)],
        [t("plan.examples"), ([, of]) => html`${of.count ? html`<${Badge} state=${shadeOf(of)}>${number(of.count)}</${Badge}>` : "0"}`, "right"],
        [t("data.share"), ([, of]) => (of.count ? percent(of.share) : "–"), "right"],
        [t("data.kinds"), ([, of]) => named(of.kinds) || "–"],
      ]} />
    </${Card}>
    ${lines.length ? html`<${Card} title=${t("data.lines")}>
      <${Table} label=${t("data.lines")} rows=${lines} rowKey=${(_, place) => place} empty="" columns=${[
        [t("new.line"), ({ one }) => number(one.line), "right"],
        [t("data.check.name"), ({ name }) => word(name)],
        [t("data.what"), ({ one }) => lineTold(one) || "–"],
      ]} />
      <p class="dim">${t("data.lines.first")}</p>
    </${Card}>` : null}`;
}

const shadeOf = (of) => (of.share > 0.05 ? "warn" : "queued");

/** What was found at a line, as the box has it. */
function lineTold(one) {
  const words = [];
  if (one.reason) words.push(one.reason);
  if (one.of !== undefined) {
    const of = t("share" in one ? "data.line_of_validation" : "data.line_of", { n: number(one.of) });
    const part = one.likeness ?? one.share;
    words.push(part === undefined ? of : t("data.part_of", { part: percent(part), of }));
  }
  for (const name of ["kind", "value"]) if (one[name] !== undefined) words.push(String(one[name]));
  if (one.tokens !== undefined) words.push(t("data.tokens", { n: number(one.tokens) }));
  return words.join(" ");
}
