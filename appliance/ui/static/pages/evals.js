// Evaluations: what models were asked and how they did, item by item.
import { get, post } from "../api.js";
import { ago, moment, number, percent } from "../format.js";
import { t } from "../i18n.js";
import { Rows } from "../rows.js";
import { Badge, Card, Facts, Failure, Live, Sure, Table, html, useAct, useLive, useState } from "../ui.js";

const ITEMS = 50;

export function Page({ rest }) {
  const [first, second] = rest;
  if (first && second) return html`<${Run} key=${second} of=${first} id=${second} />`;
  if (first) return html`<${Evaluation} key=${first} id=${first} />`;
  return html`<${List} />`;
}

function List() {
  const path = "/v1/evals?limit=100&order=desc";
  const evals = useLive((signal) => get(path, signal), 2);
  return html`<${Live} of=${evals}>${(answer) => html`<${Card} title=${t("evals")}>
    <${Rows} answer=${answer} older=${(after) => `${path}&after=${after}`} empty=${t("evals.none")} text=${(row) => `${row.name} ${row.id} ${row.owner || ""}`}>${(rows, empty) => html`
    <${Table} label=${t("evals")} rows=${rows} rowKey=${(row) => row.id} empty=${empty} columns=${[
      [t("name"), (row) => html`<a href=${`#/evals/${row.id}`}>${row.name || row.id}</a>`],
      [t("eval.criteria"), (row) => row.testing_criteria.map((one) => one.name).join(", ")],
      [t("created"), (row) => ago(row.created_at), "nowrap"],
      [t("owner"), (row) => row.owner || "–"],
    ]} />`}</${Rows}>
  </${Card}>`}</${Live}>`;
}

/** OpenAI spells it with one l. */
const stateOf = ({ status }) => (status === "canceled" ? "cancelled" : status);

/** Of a run's counts: the share that passed, of those that were judged. */
const passed = ({ total, passed: good }) => (total ? good / total : null);

function Evaluation({ id }) {
  const evaluation = useLive((signal) => get(`/v1/evals/${id}`, signal), 10, [id]);
  const runs = useLive(async (signal) => (await get(`/v1/evals/${id}/runs?limit=50&order=desc`, signal)).data, 2, [id]);
  return html`<p class="back"><a href="#/evals">← ${t("evals.all")}</a></p>
    <${Live} of=${evaluation}>${(one) => html`<${Card} title=${one.name || one.id}>
      <${Table} label=${t("eval.criteria")} rows=${one.testing_criteria} rowKey=${(row) => row.id || row.name} empty="" columns=${[
        [t("name"), (row) => row.name],
        [t("eval.grader"), (row) => row.type],
        [t("eval.passes_from"), (row) => (row.pass_threshold === undefined || row.pass_threshold === null ? "–" : number(row.pass_threshold, 3)), "right"],
      ]} />
    </${Card}>`}</${Live}>
    <${Live} of=${runs}>${(rows) => html`<${Card} title=${t("eval.runs")}>
      <${Table} label=${t("eval.runs")} rows=${rows} rowKey=${(row) => row.id} empty=${t("eval.no_runs")} columns=${[
        [t("name"), (row) => html`<a href=${`#/evals/${id}/${row.id}`}>${row.name || row.id}</a>`],
        [t("model"), (row) => row.model || "–"],
        [t("state"), (row) => html`<${Badge} state=${stateOf(row)} />${row.waits_for ? html`<br /><span class="dim">${row.waits_for}</span>` : null}`],
        [t("eval.passed"), (row) => t("of", { a: number(row.result_counts.passed), b: number(row.result_counts.total) }), "right"],
        [t("eval.rate"), (row) => percent(passed(row.result_counts)), "right"],
        [t("created"), (row) => ago(row.created_at), "nowrap"],
      ]} />
    </${Card}>`}</${Live}>`;
}

function Run({ of, id }) {
  const path = `/v1/evals/${of}/runs/${id}`;
  const run = useLive((signal) => get(path, signal), 2, [id]);
  const [cancel, { busy, error }] = useAct(async () => {
    await post(`${path}/cancel`);
    run.reload();
  });
  return html`<p class="back"><a href=${`#/evals/${of}`}>← ${t("eval.back")}</a></p>
    <${Live} of=${run}>${(one) => html`<${Card} title=${one.name || one.id} aside=${html`<${Badge} state=${stateOf(one)} />`}>
        ${one.error && one.error.message ? html`<p class="alert bad" role="alert">${one.error.message}</p>` : null}
        ${one.waits_for ? html`<p class="alert quiet">${one.waits_for}</p>` : null}
        <${Facts} pairs=${[
          [t("model"), one.model],
          [t("eval.rate"), percent(passed(one.result_counts))],
          [t("eval.passed"), number(one.result_counts.passed)],
          [t("eval.failed"), number(one.result_counts.failed)],
          [t("eval.errored"), number(one.result_counts.errored)],
          [t("eval.items"), number(one.result_counts.total)],
        ]} />
        <${Table} label=${t("eval.criteria")} rows=${one.per_testing_criteria_results} rowKey=${(row) => row.testing_criteria} empty="" columns=${[
          [t("eval.criterion"), (row) => row.testing_criteria],
          [t("eval.passed"), (row) => number(row.passed), "right"],
          [t("eval.failed"), (row) => number(row.failed), "right"],
          [t("eval.reward"), (row) => number(row.mean_reward, 3), "right"],
        ]} />
        ${["queued", "in_progress"].includes(one.status) ? html`<div class="buttons"><${Sure} class="bad" label=${t("eval.cancel")} question=${t("eval.cancel.sure")} busy=${busy} onYes=${cancel} /></div>` : null}
        <${Failure} error=${error} />
      </${Card}>
      <${Items} path=${path} of=${of} />`}</${Live}>`;
}

function Items({ path, of }) {
  const [status, setStatus] = useState("fail");
  const [pages, setPages] = useState([""]);
  const after = pages[pages.length - 1];
  const items = useLive((signal) => get(`${path}/output_items?limit=${ITEMS}&status=${status}${after ? `&after=${after}` : ""}`, signal), 2, [path, status, after]);
  const pick = (name) => () => {
    setStatus(name);
    setPages([""]);
  };
  return html`<${Card} title=${t("eval.items")} aside=${html`<div class="buttons" role="group" aria-label=${t("eval.items")}>
      ${["fail", "pass"].map((name) => html`<button type="button" class="small" aria-pressed=${status === name} onClick=${pick(name)}>${t(name === "fail" ? "eval.failed" : "eval.passed")}</button>`)}</div>`}>
    <${Live} of=${items}>${(answer) => html`<${Table} label=${t("eval.items")} rows=${answer.data} rowKey=${(row) => row.id} empty=${t("eval.no_items")} columns=${[
        [t("eval.item"), (row) => html`<pre class="cell" tabindex="0">${short(JSON.stringify(row.datasource_item))}</pre>`],
        [t("eval.answer"), (row) => short((row.sample.output[0] || {}).content || row.sample.error.message || "–")],
        [t("eval.results"), (row) => row.results.map((one) => html`<div><${Badge} state=${one.passed ? "ok" : "failed"}>${one.name}</${Badge}> ${number(one.score, 3)}</div>`)],
      ]} />
      <div class="buttons">
        ${pages.length > 1 ? html`<button type="button" onClick=${() => setPages(pages.slice(0, -1))}>${t("page.before")}</button>` : null}
        ${answer.has_more ? html`<button type="button" onClick=${() => setPages([...pages, answer.last_id])}>${t("page.more")}</button>` : null}
      </div>`}</${Live}>
  </${Card}>`;
}

const short = (text) => (text.length > 400 ? `${text.slice(0, 400)}…` : text);
