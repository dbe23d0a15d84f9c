// Jobs: the list, one job with its curves and events, and the form for a new one.
import { get, post } from "../api.js";
import { Chart } from "../chart.js";
import { ago, duration, energy, measure, moment, number } from "../format.js";
import { t } from "../i18n.js";
import { Rows } from "../rows.js";
import { Badge, Card, Facts, Failure, Live, Meter, Sure, Table, html, useAct, useLive, useMay, useRef } from "../ui.js";
import { NewJob } from "./new_job.js";

const PAGES_OF_EVENTS = 20;
const ENDED = ["succeeded", "failed", "cancelled"];

export function Page({ rest }) {
  const tunes = useMay("fine_tuning");
  if (rest[0] === "new") return html`<${NewJob} />`;
  if (rest[0]) return html`<${Job} key=${rest[0]} id=${rest[0]} />`;
  return html`<div class="buttons top">${tunes ? html`<a class="button main" href="#/jobs/new">${t("jobs.new")}</a>` : html`<p class="dim">${t("jobs.read_only")}</p>`}</div><${List} />`;
}

/** Of all owners for who may read, else of one's own. */
const JOBS = "/v1/fine_tuning/jobs";

function List() {
  const jobs = useLive((signal) => get(`${JOBS}?limit=100`, signal), 2);
  return html`<${Live} of=${jobs}>${(answer) => html`<${Card}>
    <${Rows} answer=${answer} older=${(after) => `${JOBS}?limit=100&after=${after}`} empty=${t("jobs.none")}
      text=${(row) => [row.id, row.fine_tuned_model, row.output_model, row.model, row.owner, row.phase || row.status].join(" ")}>${(found, empty) => html`
    <${Table} label=${t("nav.jobs")} rows=${found} rowKey=${(row) => row.id} empty=${empty} columns=${[
      [t("job"), (row) => html`<a href=${`#/jobs/${row.id}`}>${row.fine_tuned_model || row.output_model || row.id}</a><br /><span class="dim">${row.model}</span>`],
      [t("state"), (row) => html`<${Badge} state=${row.phase} />`],
      [t("job.progress"), (row) => row.total_steps ? `${number(row.step)} / ${number(row.total_steps)}` : "–", "right"],
      [t("job.loss"), (row) => measure(row.loss), "right"],
      [t("devices"), (row) => row.devices ? row.devices.join(", ") || "–" : "–"],
      [t("job.left"), (row) => (ENDED.includes(row.phase) ? "–" : duration(row.eta_s)), "right"],
      [t("created"), (row) => ago(row.created_s), "right"],
    ]} />`}</${Rows}>
  </${Card}>`}</${Live}>`;
}

function Job({ id }) {
  const path = `${JOBS}/${id}`;
  const tunes = useMay("fine_tuning");
  const job = useLive((signal) => get(path, signal), 2, [path]);
  const events = useEvents(id, tunes);
  const rows = useMetrics(path);
  return html`<p class="back"><a href="#/jobs">← ${t("jobs.all")}</a></p>
    <${Live} of=${job}>${(one) => html`
      <${About} job=${one} onChange=${() => { job.reload(); if (events) events.reload(); }} may=${tunes} />
      <${Curves} job=${one} metrics=${rows.data} events=${events.data} />
      ${tunes ? html`<${Checkpoints} id=${id} phase=${one.phase} /><${Events} events=${events} />` : html`<p class="alert quiet">${t("scope.needed", { scopes: "fine_tuning" })}</p>`}
    `}</${Live}>`;
}

/** All events of the job, the newest first; each look asks only for those that are new. */
function useEvents(id, may) {
  const known = useRef([]);
  return useLive(async (signal) => {
    if (!may) return [];
    const seen = new Set(known.current.map((one) => one.id));
    const fresh = [];
    let after = "";
    for (let page = 0; page < PAGES_OF_EVENTS; page += 1) {
      const answer = await get(`/v1/fine_tuning/jobs/${id}/events?limit=100${after ? `&after=${after}` : ""}`, signal);
      const unseen = answer.data.filter((one) => !seen.has(one.id));
      fresh.push(...unseen);
      if (!answer.has_more || unseen.length < answer.data.length) break;
      after = answer.last_id;
    }
    known.current = [...fresh, ...known.current];
    return known.current;
  }, 2, [id, may]);
}

/** All metrics of the job by step; each look asks again for the last steps, which a resume may have done again. */
function useMetrics(path) {
  const known = useRef(new Map());
  return useLive(async (signal) => {
    let after = Math.max(-1, ...known.current.keys()) - 20;
    for (;;) {
      const answer = await get(`${path}/metrics?limit=5000&after_step=${Math.max(-1, after)}`, signal);
      for (const row of answer.data) known.current.set(row.step, row);
      if (!answer.has_more) break;
      after = answer.data[answer.data.length - 1].step;
    }
    return [...known.current.values()].sort((a, b) => a.step - b.step);
  }, 2, [path]);
}

function About({ job, may, onChange }) {
  const over = ENDED.includes(job.phase);
  const part = job.total_steps ? job.step / job.total_steps : 0;
  return html`<${Card} title=${job.fine_tuned_model || job.output_model || job.id} aside=${html`<${Badge} state=${job.phase} />`}>
    ${job.error && job.error.message ? html`<p class="alert bad" role="alert">${job.error.message}</p>` : job.reason ? html`<p class="alert quiet">${job.reason}</p>` : null}
    ${job.total_steps ? html`<${Meter} label=${t("job.step_of", { step: number(job.step), total: number(job.total_steps) })} part=${part}
      text=${over ? "" : job.eta_s ? t("job.left_about", { time: duration(job.eta_s) }) : ""} />` : null}
    <${Facts} pairs=${[
      [t("job.id"), html`<code>${job.id}</code>`],
      [t("model"), job.model],
      [t("job.loss"), job.loss === undefined ? null : measure(job.loss)],
      [t("job.valid_loss"), job.valid_loss ? measure(job.valid_loss) : null],
      [t("job.tokens_per_s"), job.tokens_per_s ? number(job.tokens_per_s) : null],
      [t("devices"), job.devices && job.devices.length ? job.devices.join(", ") : null],
      [t("energy"), job.step || job.energy ? energy(job.energy) : null],
      [t("job.allowed"), job.allowed_sizes ? job.allowed_sizes.join(", ") : null],
      [t("job.snapshot"), job.snapshot ? t("job.snapshot_at", { step: number(job.snapshot.step) }) : null],
      [t("gate"), job.gate ? `${job.gate.verdict || job.gate.eval_id} ${job.gate.reason}` : null],
      [t("owner"), job.owner],
      [t("created"), moment(job.created_s)],
      [t("job.finished"), job.finished_s ? moment(job.finished_s) : null],
    ]} />
    ${job.method ? html`<details><summary>${t("job.settings")}</summary>
      <${Facts} pairs=${Object.entries({ ...(job.resolved || {}), ...job.method[job.method.type].hyperparameters }).map(([name, value]) => [name, typeof value === "object" ? JSON.stringify(value) : String(value)])} /></details>` : null}
    ${may && !over ? html`<${Acts} job=${job} onChange=${onChange} />` : null}
    ${job.phase === "succeeded" ? html`<div class="buttons"><a class="button" href=${`#/chat/${encodeURIComponent(job.fine_tuned_model)}`}>${t("job.try")}</a></div>` : null}
  </${Card}>`;
}

function Acts({ job, onChange }) {
  const [act, { busy, error }] = useAct(async (verb) => {
    await post(`/v1/fine_tuning/jobs/${job.id}/${verb}`);
    onChange();
  });
  const rests = job.phase === "paused" || job.phase === "pausing";
  if (job.phase === "cancelling") return null;
  return html`<div class="buttons">
    ${rests ? html`<button type="button" class="main" disabled=${busy} onClick=${() => act("resume")}>${t("job.resume")}</button>` : null}
    ${rests ? null : html`<button type="button" disabled=${busy} onClick=${() => act("pause")}>${t("job.pause")}</button>`}
    <${Sure} label=${t("job.cancel")} question=${t("job.cancel.sure")} busy=${busy} onYes=${() => act("cancel")} />
  </div><${Failure} error=${error} />`;
}

// What methods measure beside the loss: the heading of a curve, and its name in an event of a step. Of a validation the
// name has "valid_" before it, but for OpenAI's.
const MEASURED = {
  "job.reward": ["train_mean_reward", "valid_mean_reward"],
  "job.token_accuracy": ["train_mean_token_accuracy", "valid_mean_token_accuracy"],
  "job.reverse_kl": ["reverse_kl"],
  "job.answer_reverse_kl": ["answer_reverse_kl"],
  "job.accuracy": ["rewards/accuracies"],
  "job.margin": ["rewards/margins"],
  "job.entropy": ["entropy"],
  "job.answer_tokens": ["completion_tokens_mean"],
};
const validName = ([name, ofValidation]) => ofValidation || `valid_${name}`;

/** Columns over steps: from the rows of metrics, and what methods measure from the events. */
function columnsOf(metrics, events) {
  const rows = new Map();
  const at = (step) => {
    if (!rows.has(step)) rows.set(step, {});
    return rows.get(step);
  };
  for (const one of metrics || []) {
    Object.assign(at(one.step), { loss: one.loss, valid: one.valid_loss, tokens: one.tokens_per_s, devices: one.devices, rate: one.learning_rate, norm: one.grad_norm });
  }
  for (const event of events || []) {
    const data = event.data || {};
    if (event.type !== "metrics" || data.step === undefined) continue;
    const row = at(data.step);
    for (const names of Object.values(MEASURED)) {
      for (const name of [names[0], validName(names)]) row[name] ??= data[name];
    }
  }
  const steps = [...rows.keys()].sort((a, b) => a - b);
  const column = (name) => steps.map((step) => rows.get(step)[name] ?? null);
  const names = ["loss", "valid", "tokens", "devices", "rate", "norm", ...Object.values(MEASURED).flatMap((one) => [one[0], validName(one)])];
  return { steps, ...Object.fromEntries(names.map((name) => [name, column(name)])) };
}

const known = (values) => values.some((value) => value !== null);

function Curves({ job, metrics, events }) {
  const of = columnsOf(metrics, events);
  if (of.steps.length < 2) return ENDED.includes(job.phase) ? null : html`<${Card} title=${t("job.curves")}><p class="empty">${t("job.no_curve")}</p></${Card}>`;
  const words = { step: t("job.step") };
  const losses = [
    { label: t("job.loss"), colour: "--train", values: of.loss },
    ...(known(of.valid) ? [{ label: t("job.valid_loss"), colour: "--serve", values: of.valid, points: true }] : []),
  ];
  const measured = Object.entries(MEASURED).filter(([, names]) => known(of[names[0]])).map(([word, names]) => {
    const series = [
      { label: t(word), colour: "--train", values: of[names[0]] },
      ...(known(of[validName(names)]) ? [{ label: t("job.validation"), colour: "--serve", values: of[validName(names)], points: true }] : []),
    ];
    return html`<${Chart} key=${word} label=${t(word)} steps=${of.steps} series=${series} words=${words} />`;
  });
  const speed = [
    ...(known(of.devices) ? [{ label: t("devices"), colour: "--faint", values: of.devices, band: true }] : []),
    { label: t("job.tokens_per_s"), colour: "--accent", values: of.tokens },
  ];
  const alone = (label, colour, values) => (known(values) ? html`<${Chart} label=${t(label)} steps=${of.steps} series=${[{ label: t(label), colour, values }]} words=${words} />` : null);
  return html`<${Card} title=${t("job.curves")} class="charts">
    ${measured}
    <${Chart} label=${t("job.loss")} steps=${of.steps} series=${losses} words=${words} />
    ${known(of.tokens) ? html`<${Chart} label=${t("job.speed")} steps=${of.steps} series=${speed} words=${words} />` : null}
    ${alone("job.learning_rate", "--serve", of.rate)}
    ${alone("job.grad_norm", "--dim", of.norm)}
  </${Card}>`;
}

function Checkpoints({ id, phase }) {
  const found = useLive(async (signal) => (await get(`/v1/fine_tuning/jobs/${id}/checkpoints?limit=50`, signal)).data, 2, [id, phase]);
  if (!found.data || !found.data.length) return null;
  return html`<${Card} title=${t("job.checkpoints")}>
    <${Table} label=${t("job.checkpoints")} rows=${found.data} rowKey=${(row) => row.id} empty="" columns=${[
      [t("job.step"), (row) => number(row.step_number), "right"],
      [t("name"), (row) => html`<code>${row.fine_tuned_model_checkpoint}</code>`],
      [t("job.loss"), (row) => measure(row.metrics.train_loss), "right"],
      [t("job.valid_loss"), (row) => measure(row.metrics.valid_loss), "right"],
      [t("created"), (row) => ago(row.created_at), "right"],
    ]} />
  </${Card}>`;
}

function Events({ events }) {
  const rows = (events.data || []).filter((one) => one.type !== "metrics").slice(0, 200);
  return html`<${Card} title=${t("job.events")}>
    <${Failure} error=${events.error} />
    <ol class="log" tabindex="0" aria-label=${t("job.events")} aria-live="polite">
      ${rows.map((one) => html`<li key=${one.id} class=${one.level}><time>${moment(one.created_at)}</time><span>${one.level === "info" ? "" : html`<${Badge} state=${one.level} /> `}${one.message}</span></li>`)}
    </ol>
    ${rows.length ? null : html`<p class="empty">${t("job.no_events")}</p>`}
  </${Card}>`;
}

