// Numbers, sizes and times as a person reads them, in the page's language.
import { language, t } from "./i18n.js";

const DASH = "–";

export function number(value, digits = 0) {
  if (value === null || value === undefined || Number.isNaN(value)) return DASH;
  return new Intl.NumberFormat(language, { maximumFractionDigits: digits, minimumFractionDigits: 0 }).format(value);
}

/** Three significant digits: losses, learning rates. */
export function measure(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(2);
  return new Intl.NumberFormat(language, { maximumSignificantDigits: 4 }).format(value);
}

export function bytes(value) {
  if (value === null || value === undefined) return DASH;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  let left = value;
  while (left >= 1000 && place < units.length - 1) {
    left /= 1000;
    place += 1;
  }
  return `${number(left, left < 10 && place ? 1 : 0)} ${units[place]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return DASH;
  if (seconds < 1) return `${number(seconds * 1000)} ms`;
  if (seconds < 10) return `${number(seconds, 1)} s`;
  if (seconds < 120) return `${number(seconds)} s`;
  if (seconds < 7200) return `${number(seconds / 60)} min`;
  if (seconds < 172800) return `${number(seconds / 3600, 1)} h`;
  return t("time.days", { n: number(seconds / 86400) });
}

/** since: Unix time. */
export function ago(since) {
  if (!since) return DASH;
  return t("time.ago", { time: duration(Math.max(0, Date.now() / 1000 - since)) });
}

export function moment(unix) {
  if (!unix) return DASH;
  const options = { year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" };
  return new Intl.DateTimeFormat(language, options).format(new Date(unix * 1000));
}

function joules(value) {
  if (value >= 1e6) return `${measure(value / 1e6)} MJ`;
  return value >= 1e3 ? `${measure(value / 1e3)} kJ` : `${measure(value)} J`;
}

/** A bill of energy, of a job or of a plan: of the site, its cost, then by step and token. */
export function energy(bill) {
  if (!bill) return t("energy.unknown");
  const money = bill.cost === null ? "" : ` (${number(bill.cost, 2)} ${bill.currency})`;
  const parts = [`${bill.site_kwh < 0.1 ? `${measure(bill.site_kwh * 1000)} Wh` : `${measure(bill.site_kwh)} kWh`}${money}`];
  if (bill.watts_from === "limit") parts.push(t("energy.at_most"));
  if (bill.joules_per_step) parts.push(t("energy.step", { joules: joules(bill.joules_per_step) }));
  if (bill.joules_per_1000_tokens) parts.push(t("energy.tokens", { joules: joules(bill.joules_per_1000_tokens) }));
  if (bill.metered_share < 0.995) parts.push(t("energy.counted", { share: percent(bill.metered_share) }));
  return parts.join(", ");
}

export const percent = (part) => (part === null || part === undefined ? DASH : `${number(100 * part, part < 0.1 ? 1 : 0)} %`);
