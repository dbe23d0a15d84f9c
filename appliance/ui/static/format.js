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
  if (seconds < 1) return t("time.ms", { n: number(seconds * 1000) });
  if (seconds < 120) return t("time.s", { n: number(seconds, seconds < 10 ? 1 : 0) });
  if (seconds < 7200) return t("time.min", { n: number(seconds / 60) });
  if (seconds < 172800) return t("time.h", { n: number(seconds / 3600, 1) });
  return t("time.days", { n: number(seconds / 86400) });
}

/** since: Unix time. */
export function ago(since) {
  if (!since) return DASH;
  const seconds = Date.now() / 1000 - since;
  return seconds < 1 ? t("time.now") : t("time.ago", { time: duration(seconds) });
}

/** A Unix time to the second; with its year where that is not this one. */
export function moment(unix) {
  if (!unix) return DASH;
  const at = new Date(unix * 1000);
  const year = at.getFullYear() === new Date().getFullYear() ? {} : { year: "numeric" };
  const options = { ...year, month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };
  return new Intl.DateTimeFormat(language, options).format(at);
}

/** The time of day of a Unix time. */
export function clock(unix) {
  const options = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };
  return new Intl.DateTimeFormat(language, options).format(new Date(unix * 1000));
}

const BROWSERS = { Edg: "Edge", OPR: "Opera", Firefox: "Firefox", HeadlessChrome: "Chrome", Chrome: "Chrome", Version: "Safari" };
const SYSTEMS = { Android: "Android", iPhone: "iPhone", iPad: "iPad", Windows: "Windows", "Mac OS X": "macOS", Linux: "Linux" };

/** A browser by what it calls itself: "Firefox 140, Linux"; whole where it says neither as browsers do. */
export function browser(agent) {
  const name = Object.keys(BROWSERS).find((one) => agent.includes(`${one}/`));
  const system = Object.keys(SYSTEMS).find((one) => agent.includes(one));
  if (!name || !system) return agent;
  return `${BROWSERS[name]} ${agent.split(`${name}/`)[1].split(".")[0]}, ${SYSTEMS[system]}`;
}

export function joules(value) {
  if (value === null || value === undefined) return DASH;
  if (value >= 1e6) return `${measure(value / 1e6)} MJ`;
  return value >= 1e3 ? `${measure(value / 1e3)} kJ` : `${measure(value)} J`;
}

export const kwh = (value) => (value < 0.1 ? `${measure(value * 1000)} Wh` : `${measure(value)} kWh`);

/** Energy of a job: in all, then by step and token. */
export function energy(bill) {
  if (!bill) return t("energy.unknown");
  const parts = [kwh(bill.kwh)];
  if (bill.joules_per_step) parts.push(t("energy.step", { joules: joules(bill.joules_per_step) }));
  if (bill.joules_per_1000_tokens) parts.push(t("energy.tokens", { joules: joules(bill.joules_per_1000_tokens) }));
  if (bill.metered_share < 0.995) parts.push(t("energy.counted", { share: percent(bill.metered_share) }));
  return parts.join(", ");
}

export const percent = (part) => (part === null || part === undefined ? DASH : `${number(100 * part, part < 0.1 ? 1 : 0)} %`);
