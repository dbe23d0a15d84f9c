// Curves over steps, drawn by uPlot in the page's colours.
import { html, useEffect, useRef } from "./ui.js";
import { measure } from "./format.js";

const HEIGHT = 200;
// No step is between two steps.
const WHOLE = [1, 2, 5].flatMap((one) => [1, 10, 100, 1e3, 1e4, 1e5, 1e6].map((many) => one * many)).sort((a, b) => a - b);

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** series: [{label, colour (a custom property), values, band, points}]; steps: x of all; label: what a screen reader says.
 *  band: filled steps below the others, on a scale of its own. */
export function Chart({ label, steps, series, words }) {
  const place = useRef(null);
  const plot = useRef(null);
  const shape = series.map((one) => one.label).join("|");
  useEffect(() => {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const make = () => {
      if (plot.current) plot.current.destroy();
      plot.current = new window.uPlot(options(series, words, place.current.clientWidth), dataOf(steps, series), place.current);
    };
    make();
    const sized = new ResizeObserver(() => plot.current && plot.current.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    sized.observe(place.current);
    dark.addEventListener("change", make);
    return () => {
      sized.disconnect();
      dark.removeEventListener("change", make);
      plot.current.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => {
    if (plot.current) plot.current.setData(dataOf(steps, series));
  }, [steps.length, steps[steps.length - 1], series.map((one) => one.values[one.values.length - 1]).join()]);
  return html`<figure class="chart"><figcaption>${label}</figcaption><div ref=${place} role="img" aria-label=${`${label}: ${said(series)}`}></div></figure>`;
}

const dataOf = (steps, series) => [steps, ...series.map((one) => one.values)];

function said(series) {
  return series
    .map((one) => {
      const known = one.values.filter((value) => value !== null && value !== undefined);
      return known.length ? `${one.label} ${measure(known[0])} → ${measure(known[known.length - 1])}` : "";
    })
    .filter(Boolean)
    .join("; ");
}

function options(series, words, width) {
  const text = colour("--dim");
  const grid = { stroke: colour("--line"), width: 1 };
  const axis = { stroke: text, grid, ticks: grid, font: "12px system-ui, sans-serif" };
  const banded = series.some((one) => one.band);
  return {
    width,
    height: HEIGHT,
    scales: { x: { time: false }, y: banded ? { range: (_, low, high) => [0, high * 1.06 || 1] } : {}, band: { range: (_, low, high) => [0, Math.max(1, high) * 1.15] } },
    legend: { live: true },
    cursor: { points: { size: 6 } },
    axes: [
      { ...axis, incrs: WHOLE },
      { ...axis, size: 62, values: (_, ticks) => ticks.map((tick) => measure(tick)) },
      ...(banded ? [{ ...axis, scale: "band", side: 1, size: 36, grid: { show: false }, incrs: [1, 2, 4, 8, 16] }] : []),
    ],
    series: [
      { label: words.step },
      ...series.map((one) => ({
        label: one.label,
        scale: one.band ? "band" : "y",
        stroke: colour(one.colour),
        fill: one.band ? colour("--band") : undefined,
        width: one.band ? 1 : 1.75,
        paths: one.band ? window.uPlot.paths.stepped({ align: 1 }) : undefined,
        spanGaps: true,
        points: { show: Boolean(one.points), size: 6, fill: colour(one.colour) },
        value: (_, value) => measure(value),
      })),
    ],
  };
}
