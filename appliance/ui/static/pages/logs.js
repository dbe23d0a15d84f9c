// Logs: what the box's processes have written last.
import { get } from "../api.js";
import { ago, bytes } from "../format.js";
import { t } from "../i18n.js";
import { Card, Field, Live, html, useEffect, useLive, useRef, useState } from "../ui.js";

const NEAR_END = 60; // pixels within which a reader follows the end
const FIRST = "main.log"; // what the box as a whole does; others are written at each request

export function Page({ rest }) {
  const logs = useLive(async (signal) => (await get("/admin/v1/logs", signal)).data, 15);
  const asked = rest.join("/");
  return html`<${Live} of=${logs}>${(rows) => {
    if (!rows.length) return html`<p class="empty">${t("logs.none")}</p>`;
    const name = asked || (rows.find((row) => row.name === FIRST) || rows[0]).name;
    const listed = rows.some((row) => row.name === name) ? rows : [{ name, bytes: null, changed_at: null }, ...rows];
    return html`<${Card} class="logs">
      <${Field} label=${t("logs.which")}><select value=${name} onChange=${(event) => { location.hash = `#/logs/${encodeURIComponent(event.target.value)}`; }}>
        ${listed.map((row) => html`<option value=${row.name} selected=${row.name === name}>${row.name} (${bytes(row.bytes)}, ${ago(row.changed_at)})</option>`)}
      </select></${Field}>
      <${End} key=${name} name=${name} />
    </${Card}>`;
  }}</${Live}>`;
}

/** A line as a person reads it: those of the box's own processes are JSON. */
function told(line) {
  let found = null;
  try {
    found = JSON.parse(line);
  } catch {
    return line; // of another program's
  }
  if (!found || !found.time || !found.event) return line;
  const { time, level, event, process, logger, ...rest } = found;
  const more = Object.entries(rest).filter(([, value]) => value !== null && value !== "");
  const words = more.map(([name, value]) => ` ${name}=${typeof value === "object" ? JSON.stringify(value) : value}`).join("");
  return `${time.replace("T", " ").slice(0, 19)} ${level === "info" ? "" : `${level.toUpperCase()} `}${event}${words}`;
}

function End({ name }) {
  const [wanted, setWanted] = useState("");
  const place = useRef(null);
  const log = useLive((signal) => get(`/admin/v1/logs/${name.split("/").map(encodeURIComponent).join("/")}?lines=2000`, signal), 3, [name]);
  const lines = log.data ? log.data.lines.map(told) : [];
  const words = wanted.trim().toLowerCase();
  const shown = words ? lines.filter((line) => line.toLowerCase().includes(words)) : lines;
  const follows = useRef(true);
  useEffect(() => {
    if (place.current && follows.current) place.current.scrollTop = place.current.scrollHeight;
  }, [shown.length, shown[shown.length - 1]]);
  const scrolled = ({ target }) => { follows.current = target.scrollHeight - target.scrollTop - target.clientHeight < NEAR_END; };
  return html`<${Field} label=${t("find")}><input type="search" value=${wanted} onInput=${(event) => setWanted(event.target.value)} /></${Field}>
    <${Live} of=${log}>${() => (shown.length
      ? html`<pre class="lines" tabindex="0" role="log" aria-live="off" aria-label=${name} ref=${place} onScroll=${scrolled}>${shown.join("\n")}</pre>`
      : html`<p class="empty">${t(words ? "find.none" : "logs.empty")}</p>`)}</${Live}>`;
}
