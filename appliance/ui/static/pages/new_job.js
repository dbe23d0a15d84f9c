// A new job: the file with its faults by line, what to train and how, an estimate, then the job itself.
import { get, post, upload } from "../api.js";
import { bytes, measure, number } from "../format.js";
import { t, translated } from "../i18n.js";
import { Badge, Card, Facts, Failure, Field, Live, Table, html, useAct, useEffect, useLive, useMay, useState } from "../ui.js";

export function NewJob() {
  const [file, setFile] = useState(null);
  const [validation, setValidation] = useState(null);
  return html`<p class="back"><a href="#/jobs">← ${t("jobs.all")}</a></p>
    <${Card} title=${t("new.data")}>
      <${Data} label=${t("new.training_file")} hint=${t("new.training_file.what")} file=${file} onFile=${setFile} />
      <${Data} label=${t("new.validation_file")} hint=${t("new.validation_file.what")} file=${validation} onFile=${setValidation} optional />
    </${Card}>
    <${Settings} file=${file} validation=${validation} />`;
}

/** A file: one that the box has, or one from this machine, which is checked as soon as it is there. */
function Data({ label, hint, file, onFile, optional }) {
  const files = useLive(async (signal) => (await get("/v1/files?purpose=fine-tune&limit=100", signal)).data, 5);
  const [send, { busy, error }] = useAct(upload);
  const pick = async (event) => {
    const chosen = event.target.files[0];
    if (!chosen) return;
    const made = await send(chosen);
    if (made) {
      onFile(made);
      files.reload();
    }
  };
  const rows = files.data || [];
  const listed = file && !rows.some((one) => one.id === file.id) ? [file, ...rows] : rows;
  return html`<div class="data">
    <div class="fields">
      <${Field} label=${label} hint=${hint}>
        <select value=${file ? file.id : ""} onChange=${(event) => onFile(listed.find((one) => one.id === event.target.value) || null)}>
          <option value="">${t(optional ? "new.none" : "new.choose")}</option>
          ${listed.map((one) => html`<option value=${one.id}>${one.filename} (${bytes(one.bytes)})</option>`)}
        </select>
      </${Field}>
      <${Field} label=${t("new.upload")}><input type="file" accept=".jsonl,.json,.txt,.csv,.parquet" disabled=${busy} onChange=${pick} /></${Field}>
    </div>
    ${busy ? html`<p class="loading" role="status">${t("new.checking")}</p>` : null}
    <${Failure} error=${error} />
    ${file ? html`<${Faults} key=${file.id} file=${file} /><p><a href=${`#/data/${file.id}`}>${t("new.report")}</a></p>` : null}
  </div>`;
}

function Faults({ file }) {
  const found = useLive((signal) => get(`/v1/files/${file.id}/errors`, signal), 3600, [file.id]);
  return html`<${Live} of=${found}>${(answer) => answer.total
    ? html`<p class="alert bad" role="alert">${t("new.faults", { n: number(answer.total), file: file.filename })}</p>
      <${Table} label=${t("new.faults.list")} rows=${answer.data} empty="" columns=${[
        [t("new.line"), (row) => number(row.line), "right"],
        [t("new.fault"), (row) => row.reason],
      ]} />`
    : html`<p role="status"><${Badge} state="ok" /> ${t("new.no_faults", { file: file.filename, size: bytes(file.bytes) })}</p>`}</${Live}>`;
}

/** A number as the box takes it: "auto" where nothing is written. */
const numeric = (text) => (text ? Number(text) : undefined);
/** The form's field of a hyperparameter that one method alone has. */
const own = (option) => `own.${option.name}`;

function Settings({ file, validation }) {
  const plans = useMay("admin");
  const models = useLive(async (signal) => (await get("/v1/models", signal)).data, 20);
  const methods = useLive(async (signal) => (await get("/v1/fine_tuning/methods", signal)).data, 3600);
  const [model, setModel] = useState("");
  const [method, setMethod] = useState("supervised");
  const [form, setForm] = useState({ epochs: "", batch: "", rate: "", rank: "", suffix: "", devices: "", grader: "", answers: "", teacher: "", publish: "end" });
  const [plan, setPlan] = useState(null);
  const [look, looking] = useAct((body) => post("/admin/v1/plan", body));
  const [begin, beginning] = useAct((body) => post("/v1/fine_tuning/jobs", body));
  const [told, setTold] = useState("");
  const set = (name) => (event) => setForm((before) => ({ ...before, [name]: event.target.value }));
  const { takes, options, summary } = (methods.data || []).find((one) => one.name === method) || { takes: [], options: [], summary: "" };
  const first = models.data && models.data[0];
  useEffect(() => { if (!model && first) setModel(first.id); }, [first && first.id]);
  useEffect(() => setPlan(null), [model, method, file && file.id, JSON.stringify(form)]);

  const hyperparameters = Object.fromEntries(
    Object.entries({
      n_epochs: numeric(form.epochs),
      batch_size: numeric(form.batch),
      learning_rate_multiplier: numeric(form.rate),
      lora_rank: numeric(form.rank),
      ...(form.publish === "end" ? {} : { publish: form.publish }),
      ...Object.fromEntries(options.map((option) => [option.name, numeric(form[own(option)])])),
    }).filter(([, value]) => value !== undefined),
  );
  const estimate = async () => {
    const body = { model, method, hyperparameters, training_file: file ? file.id : undefined, devices: numeric(form.devices) };
    setPlan((await look(body)) || null);
  };
  const submit = async (event) => {
    event.preventDefault();
    setTold("");
    const judge = takes.includes("teacher") ? { teacher: form.teacher } : {};
    for (const [taken, text, bad] of [["grader", form.grader, "new.grader.bad"], ["response_format", form.answers.trim(), "new.answers.bad"]]) {
      if (!takes.includes(taken) || (taken === "response_format" && !text)) continue;
      try {
        judge[taken] = JSON.parse(text);
      } catch (error) {
        setTold(t(bad, { message: error.message }));
        return;
      }
    }
    const made = await begin({
      model,
      training_file: file.id,
      validation_file: validation ? validation.id : undefined,
      suffix: form.suffix || undefined,
      max_devices: numeric(form.devices),
      method: { type: method, [method]: { hyperparameters, ...judge } },
    });
    if (made) location.hash = `#/jobs/${made.id}`;
  };
  return html`<form onSubmit=${submit}><${Card} title=${t("new.how")}>
    <${Failure} error=${models.error} /><${Failure} error=${methods.error} />
    ${models.data && !models.data.length ? html`<p class="alert warm">${t("new.no_models")} <a href="#/models">${t("nav.models")}</a></p>` : null}
    <div class="fields">
      <${Field} label=${t("model")}><select required value=${model} onChange=${(event) => setModel(event.target.value)}>
        ${(models.data || []).map((one) => html`<option value=${one.id}>${one.id}</option>`)}
      </select></${Field}>
      <${Field} label=${t("new.method")} hint=${translated(`new.method.${method}`, summary)}><select value=${method} onChange=${(event) => setMethod(event.target.value)}>
        ${(methods.data || []).map(({ name }) => html`<option value=${name}>${name}</option>`)}
      </select></${Field}>
      <${Field} label=${t("new.suffix")} hint=${t("new.suffix.what")}><input maxlength="64" value=${form.suffix} onInput=${set("suffix")} /></${Field}>
      <${Field} label=${t("new.epochs")}><input type="number" min="1" max="50" placeholder="auto" value=${form.epochs} onInput=${set("epochs")} /></${Field}>
      <${Field} label=${t("new.batch")}><input type="number" min="1" placeholder="auto" value=${form.batch} onInput=${set("batch")} /></${Field}>
      <${Field} label=${t("new.rate")}><input type="number" min="0" step="any" placeholder="auto" value=${form.rate} onInput=${set("rate")} /></${Field}>
    </div>
    ${takes.includes("grader") ? html`<${Field} label=${t("new.grader")} hint=${t("new.grader.what")}>
      <textarea rows="6" required spellcheck=${false} value=${form.grader} onInput=${set("grader")}></textarea></${Field}>` : null}
    ${takes.includes("response_format") ? html`<${Field} label=${t("new.answers")} hint=${t("new.answers.what")}>
      <textarea rows="4" spellcheck=${false} placeholder='{"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}' value=${form.answers} onInput=${set("answers")}></textarea></${Field}>` : null}
    ${takes.includes("teacher") ? html`<${Field} label=${t("new.teacher")} hint=${t("new.teacher.what")}>
      <input required list="teachers" spellcheck=${false} value=${form.teacher} onInput=${set("teacher")} />
      <datalist id="teachers">${(models.data || []).filter((one) => one.id !== model).map((one) => html`<option value=${one.id} />`)}</datalist></${Field}>` : null}
    <details><summary>${t("new.more")}</summary><div class="fields">
      ${options.map((option) => html`<${Field} key=${option.name} label=${option.name} hint=${translated(`new.option.${option.name}`, option.help)}>
        <input type="number" min=${option.low} max=${option.high} step="any" placeholder=${`auto (${option.auto})`} value=${form[own(option)] || ""} onInput=${set(own(option))} /></${Field}>`)}
      <${Field} label=${t("new.rank")} hint=${t("new.rank.what")}><input type="number" min="1" placeholder="auto" value=${form.rank} onInput=${set("rank")} /></${Field}>
      <${Field} label=${t("new.devices")}><input type="number" min="1" placeholder="auto" value=${form.devices} onInput=${set("devices")} /></${Field}>
      <${Field} label=${t("new.publish")}><select value=${form.publish} onChange=${set("publish")}>
        ${["end", "epoch", "best"].map((name) => html`<option value=${name}>${t(`new.publish.${name}`)}</option>`)}
      </select></${Field}>
    </div></details>
    <div class="buttons">
      ${plans ? html`<button type="button" disabled=${!file || !model || !methods.data || looking.busy} onClick=${estimate}>${looking.busy ? t("new.estimating") : t("new.estimate")}</button>` : null}
      <button class="main" disabled=${!file || !model || !methods.data || beginning.busy}>${t("new.begin")}</button>
    </div>
    ${plans ? null : html`<p class="dim">${t("new.no_estimate")}</p>`}
    ${told ? html`<p class="alert bad" role="alert">${told}</p>` : null}
    <${Failure} error=${looking.error} /><${Failure} error=${beginning.error} />
    ${plan ? html`<${Estimate} plan=${plan} />` : null}
  </${Card}></form>`;
}

function Estimate({ plan }) {
  const { numbers, data } = plan;
  const device = numbers && numbers.device, best = (plan.layouts || [])[0];
  return html`<div class="plan" role="status">
    <h3>${t("plan.title")}</h3>
    <p><${Badge} state=${plan.fits ? "ok" : "failed"}>${t(plan.fits ? "plan.fits" : "plan.fits_not")}</${Badge}> ${plan.waits || ""}</p>
    ${(plan.problems || []).map((text) => html`<p class="alert bad">${text}</p>`)}
    ${(plan.warnings || []).map((text) => html`<p class="alert warm">${text}</p>`)}
    ${(plan.instead || []).map((text) => html`<p class="alert quiet">${typeof text === "string" ? text : JSON.stringify(text)}</p>`)}
    <${Facts} pairs=${[
      [t("plan.examples"), number(data.examples)],
      [t("plan.tokens"), number(data.tokens)],
      [t("plan.longest"), number(data.longest_example_tokens)],
      [t("plan.steps"), number(data.steps)],
      [t("plan.time"), best && best.hours !== null ? `${measure(best.hours)}, ${measure(best.kwh)}` : null],
      [t("new.epochs"), number(plan.hyperparameters.n_epochs)],
      [t("new.batch"), number(plan.hyperparameters.batch_size)],
      [t("plan.rate"), measure(plan.hyperparameters.learning_rate)],
      [t("plan.trained"), numbers ? number(numbers.trained_parameters) : null],
      [t("devices"), plan.sizes ? plan.sizes.join(", ") : null],
      [t("plan.device_memory"), device ? t("of", { a: bytes(device.device_bytes), b: bytes(device.room_bytes) }) : null],
      [t("plan.host_memory"), numbers && numbers.host ? t("of", { a: bytes(numbers.host.needed_bytes), b: bytes(numbers.host.room_bytes) }) : null],
    ]} />
  </div>`;
}
