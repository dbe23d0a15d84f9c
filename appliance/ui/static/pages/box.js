// Box: who holds each device, the mode and its switch, engines, memory, and what is not as it should be.
import { call, get, post } from "../api.js";
import { ago, bytes, joules, moment, number } from "../format.js";
import { t } from "../i18n.js";
import { Badge, Card, Facts, Failure, Field, Live, Meter, Table, degradedWord, html, useAct, useEffect, useLive, useMay, useState } from "../ui.js";

export function Page() {
  const status = useLive((signal) => get("/admin/v1/status", signal), 2);
  const mode = useLive((signal) => get("/admin/v1/mode", signal), 2);
  return html`<${Live} of=${status}>${(now) => html`
    <${Notes} now=${now} />
    <${Devices} now=${now} onChange=${status.reload} />
    <${Mode} mode=${mode} devices=${now.devices.length} handover=${now.handover} onChange=${() => { mode.reload(); status.reload(); }} />
    <${Engines} now=${now} />
    <${Memory} memory=${now.memory} />
    <${Energy} />
    <${About} now=${now} />
  `}</${Live}>`;
}

function Notes({ now }) {
  const bad = [
    ...now.degraded.map((one) => degradedWord(one)),
    ...now.troubles.map((one) => one.message || `${one.model}: ${one.reason}`),
    ...(now.memory.host && now.memory.host.short ? [now.memory.host.short] : []),
  ];
  return html`<div aria-live="polite">
    ${bad.map((text) => html`<p class="alert bad">${text}</p>`)}
    ${now.notes.map((text) => html`<p class="alert warm">${text}</p>`)}
  </div>`;
}

/** What a device does now: [kind for its colour, title, link, more]. */
function holding(device, now) {
  if (device.lost) return ["lost", t("device.lost"), null, device.lost.reason];
  if (device.holder && device.holder.kind === "job") {
    const job = now.jobs.find((one) => one.id === device.holder.id);
    const title = job ? job.output_model : device.holder.id;
    const step = job && job.total_steps ? t("job.step_of", { step: number(job.step), total: number(job.total_steps) }) : "";
    return ["train", title, `#/jobs/${device.holder.id}`, step];
  }
  if (device.holder) {
    const replica = now.replicas.find((one) => one.id === device.holder.id);
    if (!replica) return ["serve", device.holder.id, null, ""];
    const more = replica.state === "open" ? t("box.inflight", { n: number(replica.inflight) }) : t(`state.${replica.state}`);
    return ["serve", replica.model, `#/models/${encodeURIComponent(replica.model)}`, `${replica.version} · ${more}`];
  }
  return ["free", t("device.free"), null, ""];
}

function Devices({ now, onChange }) {
  const counts = { train: 0, serve: 0, free: 0 };
  for (const device of now.devices) counts[holding(device, now)[0]] += 1;
  return html`<${Card} title=${t("box.devices")} aside=${t("box.counts", counts)}>
    <ul class="tiles">
      ${now.devices.map((device) => html`<${Device} key=${device.id} device=${device} now=${now} onChange=${onChange} />`)}
    </ul>
  </${Card}>`;
}

// Of what a driver tells, whatever it tells.
function meters(told) {
  const of = (value, text) => (value === null ? [] : [text]);
  return [
    ...of(told.memory_used_bytes, bytes(told.memory_used_bytes)),
    ...of(told.temperature_c, `${number(told.temperature_c)} °C`),
    ...of(told.power_w, `${number(told.power_w)} W`),
    ...of(told.busy, t("device.busy", { share: `${number((told.busy || 0) * 100)} %` })),
    ...told.throttled.map((why) => t(`throttled.${why}`)),
  ].join(" · ");
}

function Device({ device, now, onChange }) {
  const [kind, title, link, more] = holding(device, now);
  const word = t(`device.${kind}`);
  const ill = device.health !== "ok";
  return html`<li class=${`tile ${kind}`}>
    <div class="row"><b>${device.id}</b><span class="kind">${word}</span></div>
    <div class="holder" title=${title}>${kind === "free" || kind === "lost" ? "" : link ? html`<a href=${link}>${title}</a>` : title}</div>
    ${more ? html`<div class="more">${more}</div>` : null}
    ${device.meters ? html`<div class="more meters">${meters(device.meters)}</div>` : null}
    ${ill ? html`<div class="more"><${Badge} state="bad">${device.holder || device.cordon !== "box" ? device.health : t("device.cordon.box")}</${Badge}> ${device.health_reason}</div>` : null}
    <${Drain} device=${device} onChange=${onChange} />
  </li>`;
}

function Drain({ device, onChange }) {
  const may = useMay("admin");
  const drained = Boolean(device.drain);
  const [act, { busy, error }] = useAct(async () => {
    await post(`/admin/v1/devices/${device.id}/${drained ? "undrain" : "drain"}`, drained ? undefined : {});
    onChange();
  });
  return html`${drained ? html`<div class="more"><${Badge} state="warn">${t("device.drained")}</${Badge}> ${device.drain.reason || ""}</div>` : null}
  <div class="row foot">
    <span class="more">${device.name}, ${bytes(device.memory_bytes)}</span>
    ${!may || device.lost ? null : html`<button type="button" class="small" disabled=${busy} onClick=${act} title=${t(drained ? "device.undrain.what" : "device.drain.what")}
      aria-label=${`${t(drained ? "device.undrain" : "device.drain")} ${device.id}`}>${t(drained ? "device.undrain" : "device.drain")}</button>`}
  </div><${Failure} error=${error} />`;
}

const POLICIES = ["auto", "serve", "train", "split"];
const modeName = (mode) => t(`mode.${mode.policy}`) + (mode.policy === "split" ? ` ${mode.train_devices}` : "");

function Mode({ mode, devices, handover, onChange }) {
  const may = useMay("admin");
  const [open, setOpen] = useState(false);
  return html`<${Card} title=${t("box.mode")} aside=${may && !open ? html`<button type="button" onClick=${() => setOpen(true)}>${t("mode.switch")}</button>` : null}>
    <${Live} of=${mode}>${(now) => html`
      <p class="big" data-mode=${now.policy}>${modeName(now)}</p>
      <p class="dim">${t(`mode.${now.policy}.what`)} ${setBy(now)}</p>
      ${now.notes.map((text) => html`<p class="alert warm">${text}</p>`)}
    `}</${Live}>
    ${handover ? html`<${Handover} handover=${handover} />` : null}
    ${open ? html`<${Switch} now=${mode.data} devices=${devices} onDone=${() => { setOpen(false); onChange(); }} onClose=${() => setOpen(false)} />` : null}
    ${may ? null : html`<p class="dim">${t("mode.needs_admin")}</p>`}
  </${Card}>`;
}

function setBy(mode) {
  if (mode.set_by === "window" && mode.window) return t("mode.by_window", { cron: mode.window.cron, tz: mode.window.tz });
  if (!mode.since_s) return "";
  return t("mode.since", { time: moment(mode.since_s), by: mode.by_hand.by || "box" });
}

function Handover({ handover }) {
  // Steps are written as they begin: how many will follow is not known.
  const now = handover.steps.filter((step) => step.state === "doing").map((step) => `${step.verb} ${step.target || ""}`);
  return html`<div class="meter" aria-live="polite">
    <div class="words"><span>${t("box.handover", { reason: handover.reason })}</span><span>${now.join(", ") || handover.state}</span></div>
  </div>`;
}

/** A new mode: first what it would do, then the switch itself. */
function Switch({ now, devices, onDone, onClose }) {
  const [policy, setPolicy] = useState((now && now.policy) || "auto");
  const [train, setTrain] = useState((now && now.train_devices) ?? Math.max(1, Math.round(devices / 2)));
  const [floor, setFloor] = useState("");
  const body = { policy, ...(policy === "split" ? { train_devices: Number(train) } : {}), ...(floor === "" ? {} : { serving_floor: Number(floor) }) };
  const [look, looking] = useAct(() => post("/admin/v1/mode/plan", body));
  const [plan, setPlan] = useState(null);
  const [change, changing] = useAct(async () => {
    await call("PUT", "/admin/v1/mode", body);
    onDone();
  });
  useEffect(() => setPlan(null), [policy, train, floor]);
  const ask = async (event) => {
    event.preventDefault();
    setPlan((await look()) || null);
  };
  return html`<form class="switch" onSubmit=${ask}>
    <fieldset>
      <legend>${t("mode.which")}</legend>
      ${POLICIES.map((name) => html`<label class="choice">
        <input type="radio" name="policy" value=${name} checked=${policy === name} onChange=${() => setPolicy(name)} />
        <span><b>${t(`mode.${name}`)}</b><small>${t(`mode.${name}.what`)}</small></span>
      </label>`)}
    </fieldset>
    <div class="fields">
      ${policy === "split" ? html`<${Field} label=${t("mode.train_devices")}>
        <input type="number" min="0" max=${devices} required value=${train} onInput=${(event) => setTrain(event.target.value)} /></${Field}>` : null}
      <${Field} label=${t("mode.floor")} hint=${t("mode.floor.what")}>
        <input type="number" min="0" max=${devices} value=${floor} placeholder=${now ? now.serving_floor : ""} onInput=${(event) => setFloor(event.target.value)} /></${Field}>
    </div>
    <div class="buttons">
      <button class=${plan ? "" : "main"} disabled=${looking.busy}>${t("mode.look")}</button>
      <button type="button" onClick=${onClose}>${t("cancel")}</button>
    </div>
    <${Failure} error=${looking.error} />
    ${plan ? html`<div class="plan" role="status">
      <h3>${t("mode.would")}</h3>
      ${plan.steps.length ? html`<ol>${plan.steps.map((text) => html`<li>${text}</li>`)}</ol>` : html`<p>${t("mode.nothing_moves")}</p>`}
      <${Said} title=${t("mode.would_wait")} of=${plan.waiting} />
      <${Said} title=${t("mode.would_note")} of=${{ ...plan.notes, ...plan.idle, ...plan.standby }} />
      <div class="buttons"><button type="button" class="main" disabled=${changing.busy} onClick=${change}>${t("mode.do")}</button></div>
      <${Failure} error=${changing.error} />
    </div>` : null}
  </form>`;
}

function Said({ title, of }) {
  const rows = Object.entries(of || {});
  if (!rows.length) return null;
  return html`<h3>${title}</h3><ul>${rows.map(([name, text]) => html`<li><b>${name}</b>: ${typeof text === "string" ? text : JSON.stringify(text)}</li>`)}</ul>`;
}

function Engines({ now }) {
  const waiting = Object.entries(now.requests || {}).filter(([, one]) => one.held);
  return html`<${Card} title=${t("box.engines")}>
    ${waiting.map(([model, one]) => html`<p class="alert warm" role="status">${t("box.held", { model, n: number(one.held) })}</p>`)}
    <${Table} label=${t("box.engines")} rows=${now.replicas} rowKey=${(row) => row.id} empty=${t("box.no_engines")} columns=${[
      [t("engine.id"), (row) => row.id],
      [t("model"), (row) => html`<a href=${`#/models/${encodeURIComponent(row.model)}`}>${row.model}</a> <span class="dim">${row.version}</span>`],
      [t("state"), (row) => html`<${Badge} state=${row.state} />`],
      [t("devices"), (row) => row.devices.join(", ") || "–"],
      [t("engine.requests"), (row) => number(row.inflight), "right"],
      [t("engine.memory"), (row) => bytes(row.rss_bytes), "right"],
    ]} />
  </${Card}>`;
}

function Memory({ memory }) {
  const host = memory.host;
  const free = host ? host.available_bytes : null;
  return html`<${Card} title=${t("box.memory")}>
    <${Meter} label=${t("memory.store")} part=${memory.used_bytes / Math.max(1, memory.budget_bytes)} text=${t("of", { a: bytes(memory.used_bytes), b: bytes(memory.budget_bytes) })} />
    ${host ? html`<${Meter} label=${t("memory.host", { where: host.where === "this machine" ? t("health.home") : host.where })} part=${1 - free / Math.max(1, host.total_bytes)} text=${t("of", { a: bytes(host.total_bytes - free), b: bytes(host.total_bytes) })} />` : null}
  </${Card}>`;
}

const WEEK_S = 7 * 86400;

/** How much each job has drawn. */
function Energy() {
  const drawn = useLive((signal) => get(`/admin/v1/power?since_s=${Math.floor(Date.now() / 1000 - WEEK_S)}`, signal), 60);
  return html`<${Card} title=${t("energy.title")}><${Live} of=${drawn}>${({ data, limits, meters: count }) => html`
    ${limits.set ? html`<${Facts} pairs=${[[t("energy.limit"), limits.limit_w === null ? t("energy.own_limit") : `${number(limits.limit_w)} W`]]} />` : null}
    <${Table} label=${t("energy.title")} rows=${data} empty=${t(count ? "energy.none" : "energy.unknown")} columns=${[
      [t("energy.by"), (row) => html`<a href=${`#/jobs/${row.job}`}>${row.job}</a>`],
      [t("energy"), (row) => joules(row.joules), "right"],
      [t("energy.device_hours"), (row) => number(row.metered_s / 3600, 2), "right"],
      [t("energy.watts"), (row) => (row.metered_s ? number(row.joules / row.metered_s) : "–"), "right"],
      [t("energy.per_tokens"), (row) => joules(row.joules_per_1000_tokens), "right"],
    ]} />`}</${Live}></${Card}>`;
}

function About({ now }) {
  const box = now.box;
  return html`<${Card} title=${t("box.about")}><${Facts} pairs=${[
    [t("box.endpoint"), html`<code>${box.url}</code>`],
    [t("box.version"), box.version],
    [t("box.started"), box.started_s ? ago(box.started_s) : null],
    [t("box.certificate"), box.certificate_expires_s ? moment(box.certificate_expires_s) : t("box.no_tls")],
    [t("box.backup"), box.backup ? ago(box.backup.made_s) : t("box.no_backup")],
    [t("box.asleep"), now.memory.asleep_per_device === undefined ? null : number(now.memory.asleep_per_device)],
  ]} /></${Card}>`;
}
