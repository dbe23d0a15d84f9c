// Timeline: who held each device when, what each hand-over cost, and the requests that wait now.
import { get } from "../api.js";
import { bytes, clock, duration, moment, number } from "../format.js";
import { t } from "../i18n.js";
import { Badge, Card, Live, Table, html, useLive, useRef, useState } from "../ui.js";
import { between, lanesOf, moved, scaled } from "./lanes.js";

const SPANS = { 900: "15 min", 3600: "1 h", 21600: "6 h", 86400: "24 h" };
const TURNS = { "timeline.earlier": ["←", (view, now) => moved(view, now, -0.5)], "timeline.later": ["→", (view, now) => moved(view, now, 0.5)],
  "timeline.closer": ["+", (view, now) => scaled(view, now, 0.5)], "timeline.wider": ["−", (view, now) => scaled(view, now, 2)] };
const LEAST_DRAG = 0.01; // of the width: less is a click

export function Page() {
  const [view, setView] = useState({ span: 3600, until: null });
  const [picked, setPicked] = useState(null);
  const shown = useLive(async (signal) => {
    const [handovers, status, jobs] = await Promise.all([
      get("/admin/v1/handovers?limit=500", signal),
      get("/admin/v1/status", signal),
      get("/v1/fine_tuning/jobs?limit=200", signal),
    ]);
    return { handovers: handovers.data, status: { ...status, jobs: jobs.data } };
  }, 2);
  const now = Date.now() / 1000;
  const until = view.until ?? now;
  const since = until - view.span;
  return html`<${Live} of=${shown}>${({ handovers, status }) => html`
    <${Card} title=${t("timeline.devices")} aside=${html`<div class="buttons" role="group" aria-label=${t("timeline.span")}>
        ${Object.entries(SPANS).map(([seconds, name]) => html`<button type="button" class="small" aria-pressed=${view.until === null && view.span === Number(seconds)} onClick=${() => setView({ span: Number(seconds), until: null })}>${name}</button>`)}
        ${Object.entries(TURNS).map(([word, [sign, turn]]) => html`<button type="button" class="small" aria-label=${t(word)} title=${t(word)} onClick=${() => setView((before) => turn(before, Date.now() / 1000))}>${sign}</button>`)}
      </div>`}>
      <p class="legend" aria-live="polite">${view.until === null ? t("timeline.drag") : t("timeline.range", { from: moment(since), to: moment(until) })}</p>
      <${Lanes} handovers=${handovers} status=${status} since=${since} until=${until} isNow=${view.until === null} onPick=${setPicked}
        onDrag=${(from, to) => setView(between(since + from * view.span, since + to * view.span, now))} />
    </${Card}>
    <${Waiting} requests=${status.requests} />
    <${Handovers} handovers=${handovers.filter((one) => one.started_s < until && (one.ended_s ?? Infinity) > since)} picked=${picked} onPick=${setPicked} />
  `}</${Live}>`;
}

/** onDrag(from, to): what somebody drew the pointer over, as shares of the width. */
function Lanes({ handovers, status, since, until, isNow, onPick, onDrag }) {
  const place = useRef(null);
  const [drawn, setDrawn] = useState(null);
  const share = (event) => {
    const { left, width } = place.current.querySelector(".bar").getBoundingClientRect();
    return Math.max(0, Math.min(1, (event.clientX - left) / width));
  };
  const begin = (event) => {
    if (event.button !== 0 || event.target.closest("button")) return;
    place.current.setPointerCapture(event.pointerId);
    setDrawn([share(event), share(event)]);
  };
  const end = () => {
    const [from, to] = [...drawn].sort((a, b) => a - b);
    setDrawn(null);
    if (to - from > LEAST_DRAG) onDrag(from, to);
  };
  const span = until - since;
  const { lanes, moves } = lanesOf(handovers, status, since, until);
  const at = (time) => `${(100 * (Math.max(since, Math.min(until, time)) - since)) / span}%`;
  const wide = (from, to) => `${Math.max(0.15, (100 * (Math.min(until, to) - Math.max(since, from))) / span)}%`;
  const over = drawn ? html`<div class="drawn" style=${{ left: `${100 * Math.min(...drawn)}%`, width: `${100 * Math.abs(drawn[1] - drawn[0])}%` }}></div>` : null;
  return html`<div class="lanes" ref=${place} onPointerDown=${begin} onPointerMove=${(event) => drawn && setDrawn([drawn[0], share(event)])}
    onPointerUp=${() => drawn && end()} onPointerCancel=${() => setDrawn(null)}>
    ${lanes.map((lane) => html`<div class="lane" key=${lane.device}>
      <b>${lane.device}</b>
      <div class="bar" role="img" aria-label=${`${lane.device}: ${lane.spans.map((one) => `${t(`device.${one.kind}`)} ${one.name} ${duration(one.to - one.from)}`).join(", ")}`}>
        ${lane.spans.map((one) => html`<div class=${`span ${one.kind}`} style=${{ left: at(one.from), width: wide(one.from, one.to) }}
          title=${`${t(`device.${one.kind}`)} ${one.name}\n${moment(one.from)} · ${duration(one.to - one.from)}`}><span>${one.name}</span></div>`)}${over}
      </div>
    </div>`)}
    <div class="lane moves"><b>${t("timeline.moves")}</b><div class="bar">
      ${moves.map((one) => html`<button type="button" class=${`move ${one.state}`} style=${{ left: at(one.started_s), width: wide(one.started_s, one.ended_s ?? until) }}
        aria-label=${t("timeline.move", { id: one.id, reason: one.reason })} title=${`${one.reason}\n${moment(one.started_s)} · ${duration(one.seconds)}`} onClick=${() => onPick(one.id)}></button>`)}
    </div></div>
    <div class="lane axis"><b></b><div class="bar">${[0, 0.25, 0.5, 0.75].map((part) => html`<span style=${{ left: `${100 * part}%` }}>${isNow ? `−${duration(span * (1 - part))}` : clock(since + part * span)}</span>`)}${isNow ? html`<span class="now">${t("timeline.now")}</span>` : null}</div></div>
  </div>
  <p class="legend"><span class="dot serve"></span>${t("device.serve")} <span class="dot train"></span>${t("device.train")} <span class="dot free"></span>${t("device.free")} <span class="dot hand"></span>${t("timeline.moves")}</p>`;
}

function Waiting({ requests }) {
  const held = Object.entries(requests || {}).filter(([, one]) => one.held);
  return html`<div aria-live="polite">${held.map(([model, one]) => html`<p class="alert warm">${t("box.held", { model, n: number(one.held) })}</p>`)}</div>`;
}

function Handovers({ handovers, picked, onPick }) {
  const one = handovers.find((found) => found.id === picked);
  return html`${one ? html`<${Steps} one=${one} onClose=${() => onPick(null)} />` : null}
  <${Card} title=${t("timeline.handovers")}>
    <${Table} label=${t("timeline.handovers")} rows=${handovers.slice(0, 200)} rowKey=${(row) => row.id} empty=${t("timeline.none")} columns=${[
      [t("timeline.when"), (row) => moment(row.started_s), "nowrap"],
      [t("timeline.why"), (row) => html`<button type="button" class="link" onClick=${() => onPick(row.id)}>${row.reason}</button>${row.error ? html`<br /><span class="dim">${row.error}</span>` : null}`],
      [t("state"), (row) => html`<${Badge} state=${row.state} />`],
      [t("timeline.took"), (row) => duration(row.seconds), "right"],
      [t("timeline.bytes"), (row) => (row.bytes ? bytes(row.bytes) : "–"), "right"],
      [t("timeline.by"), (row) => row.asked_by || "–"],
    ]} />
  </${Card}>`;
}

function Steps({ one, onClose }) {
  const first = one.started_s;
  return html`<${Card} title=${t("timeline.one", { id: one.id })} aside=${html`<button type="button" class="small" onClick=${onClose}>${t("close")}</button>`}>
    <p>${one.reason}</p>
    ${one.error ? html`<p class="alert bad">${one.error}</p>` : null}
    <${Table} label=${t("timeline.steps")} rows=${one.steps} empty="" columns=${[
      [t("timeline.step"), (row) => html`<code>${row.verb}</code>`],
      [t("timeline.target"), (row) => row.target || "–"],
      [t("state"), (row) => html`<${Badge} state=${row.state} />`],
      [t("timeline.after"), (row) => (row.started_s ? duration(row.started_s - first) : "–"), "right"],
      [t("timeline.took"), (row) => duration(row.seconds), "right"],
      [t("timeline.bytes"), (row) => (row.bytes ? bytes(row.bytes) : "–"), "right"],
      [t("timeline.path"), (row) => row.path || "–"],
    ]} />
  </${Card}>`;
}
