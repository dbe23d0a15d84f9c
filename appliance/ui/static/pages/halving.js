// A sweep as lines: what each trial came to in each round, over the share of the data that it learnt from.
import { measure, percent } from "../format.js";
import { t } from "../i18n.js";
import { html, useEffect, useRef, useState } from "../ui.js";

const HEIGHT = 280;
const EDGE = { top: 14, right: 16, bottom: 44, left: 56 };
const TICKS = 5;
const FAR = 2.5; // times as far from the best as half of the trials are

/** rows: [{place, name, values (of each round, null for one without), jobs (their ids), best}]; rounds: [{share}]; unit:
 *  what is compared; up: whether more is better. picked, onPick: the trial that somebody points at, by its place. */
export function Halving({ rows, rounds, unit, up, picked, onPick }) {
  const place = useRef(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const sized = new ResizeObserver(() => setWidth(place.current.clientWidth));
    sized.observe(place.current);
    return () => sized.disconnect();
  }, []);
  const known = rows.filter((row) => row.values.some((value) => value !== null));
  const shown = known.find((row) => row.place === picked);
  const said = known.map((row) => `${row.name}: ${row.values.filter((value) => value !== null).map(measure).join(" → ")}`);
  return html`<figure class="chart halving" ref=${place}>
    <figcaption>${t("sweep.plot", { unit })}</figcaption>
    ${width && known.length ? html`<svg width=${width} height=${HEIGHT} role="img" aria-label=${`${unit}: ${said.join("; ")}`} onMouseLeave=${() => onPick(null)}>
      <${Lines} known=${known} rounds=${rounds} width=${width} up=${up} picked=${picked} onPick=${onPick} />
    </svg>` : html`<p class="empty">${t("sweep.plot.none")}</p>`}
    <p class="dim" aria-hidden="true">${shown ? said[known.indexOf(shown)] : t("sweep.plot.what")}</p>
  </figure>`;
}

function Lines({ known, rounds, width, up, picked, onPick }) {
  const { low, high, ticks } = scaleOf(known.flatMap((row) => row.values).filter((value) => value !== null), up);
  const apart = (width - EDGE.left - EDGE.right) / Math.max(1, rounds.length - 1);
  const x = (round) => (rounds.length === 1 ? (EDGE.left + width - EDGE.right) / 2 : EDGE.left + apart * round);
  const y = (value) => EDGE.top + (HEIGHT - EDGE.top - EDGE.bottom) * (1 - (Math.max(low, Math.min(high, value)) - low) / (high - low));
  // The best is drawn last, above the others; so is one that somebody points at.
  const order = [...known].sort((a, b) => rank(a, picked) - rank(b, picked));
  return html`
    ${ticks.map((tick) => html`<line class="grid" x1=${EDGE.left} x2=${width - EDGE.right} y1=${y(tick)} y2=${y(tick)} /><text x=${EDGE.left - 8} y=${y(tick) + 4} text-anchor="end">${measure(tick)}</text>`)}
    ${rounds.map((round, at) => html`<line class="grid" x1=${x(at)} x2=${x(at)} y1=${EDGE.top} y2=${HEIGHT - EDGE.bottom} />
      <text x=${x(at)} y=${HEIGHT - EDGE.bottom + 18} text-anchor=${anchor(at, rounds.length)}>${t("sweep.plot.round", { n: at + 1 })}</text>
      <text x=${x(at)} y=${HEIGHT - EDGE.bottom + 34} text-anchor=${anchor(at, rounds.length)}>${percent(round.share)}</text>`)}
    ${order.map((row) => {
      const points = row.values.map((value, at) => [at, value]).filter(([, value]) => value !== null);
      const kind = `trial ${row.best ? "best" : row.values.length === rounds.length ? "last" : ""} ${row.place === picked ? "picked" : ""}`;
      const at = points.map(([round, value]) => `${x(round)},${y(value)}`).join(" ");
      return html`<g key=${row.place} class=${kind} onMouseEnter=${() => onPick(row.place)}>
        <polyline class="reach" points=${at} /><polyline points=${at} />
        ${points.map(([round, value]) => html`<circle cx=${x(round)} cy=${y(value)} r="4" onClick=${() => { location.hash = `#/jobs/${row.jobs[round]}`; }} />`)}
      </g>`;
    })}`;
}

const rank = (row, picked) => (row.place === picked ? 2 : row.best ? 1 : 0);

const anchor = (at, count) => (count > 1 && at === 0 ? "start" : count > 1 && at === count - 1 ? "end" : "middle");

/** From the best value to the worst; a trial that diverged is drawn at the edge, or the others would be one line. */
function scaleOf(values, up) {
  const sorted = [...values].sort((a, b) => (up ? b - a : a - b));
  const best = sorted[0];
  const middle = sorted[Math.floor((sorted.length - 1) / 2)];
  const worst = sorted[sorted.length - 1];
  const far = Math.abs(middle - best) * FAR;
  const edge = far && Math.abs(worst - best) > far ? best + (up ? -far : far) : worst;
  const span = Math.abs(edge - best) || Math.abs(best) / 10 || 1;
  const low = Math.min(best, edge) - span * 0.06;
  const high = Math.max(best, edge) + span * 0.06;
  const raw = (high - low) / TICKS;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * size).find((one) => one >= raw);
  const first = Math.ceil(low / step);
  return { low, high, ticks: Array.from({ length: Math.max(0, Math.floor(high / step) - first + 1) }, (_, at) => (first + at) * step) };
}
