// Pipelines and sweeps: from data to a version that answers, step by step; searches of hyperparameters, by round.
import { get, post } from "../api.js";
import { ago, duration, measure, moment, number, percent } from "../format.js";
import { t } from "../i18n.js";
import { Rows } from "../rows.js";
import { Badge, Card, Facts, Failure, Live, Sure, Table, html, useAct, useLive, useState } from "../ui.js";
import { Halving } from "./halving.js";

export function Page({ rest }) {
  const [kind, id] = rest;
  if (kind === "sweep" && id) return html`<${Sweep} key=${id} id=${id} />`;
  if (kind && kind !== "sweep") return html`<${Pipeline} key=${kind} name=${kind} />`;
  return html`<${List} /><${Sweeps} />`;
}

const outcome = (run) => html`<${Badge} state=${run.outcome && run.outcome !== "answers" ? "queued" : run.state}>${run.outcome ? t(`pipeline.outcome.${run.outcome}`) : undefined}</${Badge}>`;

function List() {
  const pipelines = useLive((signal) => get("/v1/pipelines?limit=100", signal), 2);
  return html`<${Live} of=${pipelines}>${(answer) => html`<${Card} title=${t("pipelines")}>
    <${Rows} answer=${answer} older=${(after) => `/v1/pipelines?limit=100&after=${after}`} empty=${t("pipelines.none")} text=${(row) => `${row.name} ${row.owner || ""}`}>${(rows, empty) => html`
    <${Table} label=${t("pipelines")} rows=${rows} rowKey=${(row) => row.id} empty=${empty} columns=${[
      [t("name"), (row) => html`<a href=${`#/pipelines/${encodeURIComponent(row.name)}`}>${row.name}</a>`],
      [t("pipeline.last"), (row) => (row.last_run ? outcome(row.last_run) : "–")],
      [t("pipeline.now"), (row) => stepOf(row.last_run)],
      [t("pipeline.next"), (row) => (row.scheduled && row.next_at ? moment(row.next_at) : t("pipeline.asked")), "nowrap"],
      [t("owner"), (row) => row.owner || "–"],
    ]} />`}</${Rows}>
  </${Card}>`}</${Live}>`;
}

/** The step that a run is at, or what it ended with. */
function stepOf(run) {
  if (!run) return "–";
  const step = run.state === "running" ? run.steps.find((one) => one.state === "running") : null;
  return step ? `${stepWord(step.name)}${step.says ? `: ${step.says}` : ""}` : run.reason || "–";
}

const STEPS = ["data", "check", "prepare", "train", "evaluate", "gate", "canary", "promote"];
const stepWord = (name) => (STEPS.includes(name) ? t(`step.${name}`) : name);

function Pipeline({ name }) {
  const path = `/v1/pipelines/${encodeURIComponent(name)}`;
  const pipeline = useLive((signal) => get(path, signal), 2, [name]);
  const runs = useLive(async (signal) => (await get(`${path}/runs?limit=20`, signal)).data, 2, [name]);
  const [act, { busy, error }] = useAct(async (url, body) => {
    await post(url, body);
    pipeline.reload();
    runs.reload();
  });
  return html`<p class="back"><a href="#/pipelines">← ${t("pipelines.all")}</a></p>
    <${Live} of=${pipeline}>${(one) => html`<${Card} title=${one.name}>
      ${one.note ? html`<p class="alert warm">${one.note}</p>` : null}
      <${Facts} pairs=${[
        [t("model"), (one.spec.train || {}).model],
        [t("pipeline.next"), one.scheduled && one.next_at ? moment(one.next_at) : t("pipeline.asked")],
        [t("owner"), one.owner],
      ]} />
      <div class="buttons">
        <button type="button" class="main" disabled=${busy || (one.last_run && one.last_run.state === "running")} onClick=${() => act(`${path}/runs`)}>${t("pipeline.run")}</button>
        ${one.spec.schedule ? html`<button type="button" disabled=${busy} onClick=${() => act(`${path}/schedule`, { on: !one.scheduled })}>${t(one.scheduled ? "pipeline.unschedule" : "pipeline.schedule")}</button>` : null}
      </div>
      <${Failure} error=${error} />
      <details><summary>${t("pipeline.spec")}</summary><pre tabindex="0"><code>${JSON.stringify(one.spec, null, 2)}</code></pre></details>
    </${Card}>`}</${Live}>
    <${Live} of=${runs}>${(rows) => (rows.length
      ? rows.map((run) => html`<${Run} key=${run.id} run=${run} busy=${busy} onCancel=${() => act(`/v1/pipeline_runs/${run.id}/cancel`)} />`)
      : html`<p class="empty">${t("pipeline.no_runs")}</p>`)}</${Live}>`;
}

function Run({ run, busy, onCancel }) {
  return html`<${Card} title=${t("pipeline.run_of", { when: moment(run.created_at) })} aside=${outcome(run)}>
    ${run.reason ? html`<p class="alert quiet">${run.reason}</p>` : null}
    <${Table} label=${t("pipeline.steps")} rows=${run.steps} rowKey=${(step) => step.name} empty="" columns=${[
      [t("pipeline.step"), (step) => stepWord(step.name)],
      [t("state"), (step) => html`<${Badge} state=${step.state === "skipped" ? "skip" : step.state === "waiting" ? "queued" : step.state} />`],
      [t("pipeline.took"), (step) => (step.began_s ? duration((step.ended_s || Date.now() / 1000) - step.began_s) : "–"), "right"],
      [t("data.what"), (step) => step.says || "–"],
    ]} />
    <${Facts} pairs=${[
      [t("pipeline.data"), t("pipeline.data_of", { files: number(run.data.files), bytes: number(run.data.bytes) })],
      [t("job"), run.job_id ? html`<a href=${`#/jobs/${run.job_id}`}>${run.job_id}</a>` : null],
      [t("data.file"), run.file_id ? html`<a href=${`#/data/${run.file_id}`}>${run.file_id}</a>` : null],
      [t("gate"), run.gate_id ? html`<a href=${`#/evals/gate/${run.gate_id}`}>${run.gate_id}</a>` : null],
    ]} />
    ${run.state === "running" ? html`<div class="buttons"><${Sure} class="bad" label=${t("pipeline.cancel")} question=${t("pipeline.cancel.sure")} busy=${busy} onYes=${onCancel} /></div>` : null}
  </${Card}>`;
}

function Sweeps() {
  const sweeps = useLive((signal) => get("/v1/sweeps?limit=50", signal), 2);
  return html`<${Live} of=${sweeps}>${(answer) => html`<${Card} title=${t("sweeps")}>
    <${Rows} answer=${answer} older=${(after) => `/v1/sweeps?limit=50&after=${after}`} empty=${t("sweeps.none")} text=${(row) => `${row.name} ${row.state}`}>${(rows, empty) => html`
    <${Table} label=${t("sweeps")} rows=${rows} rowKey=${(row) => row.id} empty=${empty} columns=${[
      [t("name"), (row) => html`<a href=${`#/pipelines/sweep/${row.id}`}>${row.name}</a>`],
      [t("state"), (row) => html`<${Badge} state=${row.state} />`],
      [t("sweep.round"), (row) => t("of", { a: number(Math.min(row.round + 1, row.rounds.length)), b: number(row.rounds.length) }), "right"],
      [t("sweep.trials"), (row) => number(row.trials.length), "right"],
      [t("sweep.best"), (row) => (row.best ? `${parameters(row.best.parameters)} (${compared(row).value(row.best.loss)})` : "–")],
      [t("usage.device_hours"), (row) => number(row.device_hours, 2), "right"],
      [t("created"), (row) => ago(row.created_at), "nowrap"],
    ]} />`}</${Rows}>
  </${Card}>`}</${Live}>`;
}

/** What a sweep's trials are compared by. Rewards are kept as losses, with the sign turned. */
function compared(sweep) {
  const rewards = ((sweep.spec.train || {}).method || {}).type === "reinforcement";
  const turned = (loss) => (loss === null || loss === undefined ? null : rewards ? -loss : loss);
  return { rewards, unit: t(rewards ? "sweep.reward" : "job.valid_loss"), turned, value: (loss) => measure(turned(loss)) };
}

const parameters = (of) => Object.entries(of).map(([name, value]) => `${name} ${typeof value === "number" ? measure(value) : value}`).join(", ");

function Sweep({ id }) {
  const sweep = useLive((signal) => get(`/v1/sweeps/${id}`, signal), 2, [id]);
  const [cancel, { busy, error }] = useAct(async () => {
    await post(`/v1/sweeps/${id}/cancel`);
    sweep.reload();
  });
  return html`<p class="back"><a href="#/pipelines">← ${t("pipelines.all")}</a></p>
    <${Live} of=${sweep}>${(one) => html`
      <${Card} title=${one.name} aside=${html`<${Badge} state=${one.state} />`}>
        ${one.reason ? html`<p class="alert quiet">${one.reason}</p>` : null}
        <${Facts} pairs=${[
          [t("sweep.round"), t("of", { a: number(Math.min(one.round + 1, one.rounds.length)), b: number(one.rounds.length) })],
          [t("sweep.trials"), one.rounds.map((round) => number(round.trials)).join(" → ")],
          [t("sweep.shares"), one.rounds.map((round) => percent(round.share)).join(" → ")],
          [t("sweep.best"), one.best ? parameters(one.best.parameters) : null],
          [compared(one).unit, one.best ? compared(one).value(one.best.loss) : null],
          [t("model"), one.best && one.best.model ? html`<a href=${`#/models/${encodeURIComponent(one.best.model)}`}>${one.best.model}</a>` : null],
          [t("usage.device_hours"), number(one.device_hours, 2)],
          [t("created"), moment(one.created_at)],
        ]} />
        ${one.state === "running" ? html`<div class="buttons"><${Sure} class="bad" label=${t("sweep.cancel")} question=${t("sweep.cancel.sure")} busy=${busy} onYes=${cancel} /></div>` : null}
        <${Failure} error=${error} />
      </${Card}>
      <${Trials} sweep=${one} />`}</${Live}>`;
}

/** Each trial with what it came to in each round, as lines and as a table. */
function Trials({ sweep }) {
  const [picked, setPicked] = useState(null);
  const { rewards, unit, turned } = compared(sweep);
  const rows = ranked(sweep.trials).map(({ trial, place }) => ({
    place,
    name: parameters(trial.parameters),
    values: trial.jobs.map((one) => turned(one.loss)),
    states: trial.jobs.map((one) => one.state),
    jobs: trial.jobs.map((one) => one.job_id),
    best: Boolean(sweep.best) && sweep.best.trial === place,
  }));
  const ofRound = (row, at) => (at >= row.jobs.length ? "–"
    : html`<a href=${`#/jobs/${row.jobs[at]}`}>${row.values[at] === null ? html`<${Badge} state=${row.states[at]} />` : measure(row.values[at])}</a>`);
  return html`<${Card} title=${t("sweep.trials")}>
    <${Halving} rows=${rows} rounds=${sweep.rounds} unit=${unit} up=${rewards} picked=${picked} onPick=${setPicked} />
    <${Table} label=${t("sweep.trials")} rows=${rows} rowKey=${(row) => row.place} empty="" columns=${[
      [t("sweep.parameters"), (row) => html`<span onMouseEnter=${() => setPicked(row.place)} onMouseLeave=${() => setPicked(null)}>${row.name}</span> ${row.best ? html`<${Badge} state="ok">${t("sweep.best")}</${Badge}>` : null}`],
      ...sweep.rounds.map((round, at) => [t("sweep.on", { share: percent(round.share) }), (row) => ofRound(row, at), "right"]),
    ]} />
  </${Card}>`;
}

/** The trials, those that went furthest first, then by their loss. */
function ranked(trials) {
  const rows = trials.map((trial, place) => {
    const known = [...trial.jobs].reverse().find((one) => one.loss !== null && one.loss !== undefined);
    return { trial, place, loss: known ? known.loss : null };
  });
  return rows.sort((a, b) => b.trial.jobs.length - a.trial.jobs.length || (a.loss ?? Infinity) - (b.loss ?? Infinity));
}
