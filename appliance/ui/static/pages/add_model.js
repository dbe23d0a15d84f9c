// Where models come from: one is imported; how far each is, and why one failed.
import { get, post } from "../api.js";
import { ago, bytes, number } from "../format.js";
import { t } from "../i18n.js";
import { Badge, Card, Failure, Field, Meter, html, useAct, useLive, useState } from "../ui.js";

const TOLD_S = 600; // how long a failure stands here

/** empty: the box has no model yet. */
export function AddModel({ empty, onDone }) {
  const [open, setOpen] = useState(empty);
  const [form, setForm] = useState({ source: "", name: "" });
  const set = (field) => (event) => setForm((before) => ({ ...before, [field]: event.target.value }));
  const running = useLive(async (signal) => (await get("/admin/v1/operations", signal)).data, 2);
  const begun = () => {
    running.reload();
    onDone();
  };
  const [importIt, importing] = useAct(async () => {
    await post("/admin/v1/models/import", { source: form.source.trim(), ...(form.name.trim() ? { name: form.name.trim() } : {}) });
    setForm({ source: "", name: "" });
    begun();
  });
  const shown = (running.data || []).filter((one) => one.state === "running" || (one.state === "failed" && Date.now() / 1000 - one.ended_s < TOLD_S));
  if (!open && !shown.length) return html`<div class="buttons top"><button type="button" onClick=${() => setOpen(true)}>${t("add.title")}</button></div>`;
  return html`<${Card} title=${t("add.title")}>
    ${empty ? html`<p>${t("add.first")}</p>` : null}
    ${open ? html`<form class="plan" onSubmit=${(event) => { event.preventDefault(); importIt(); }}>
      <div class="fields">
        <${Field} label=${t("add.source")} hint=${t("add.source.what")}><input required autocomplete="off" spellcheck=${false} value=${form.source} onInput=${set("source")} /></${Field}>
        <${Field} label=${t("add.name")} hint=${t("add.name.what")}><input autocomplete="off" spellcheck=${false} value=${form.name} onInput=${set("name")} /></${Field}>
      </div>
      <div class="buttons">
        <button class="main" disabled=${importing.busy}>${t("add.import")}</button>
        ${empty ? null : html`<button type="button" onClick=${() => setOpen(false)}>${t("cancel")}</button>`}
      </div>
      <${Failure} error=${importing.error} />
    </form>` : null}
    ${shown.map((one) => html`<${Under} key=${one.id} one=${one} />`)}
  </${Card}>`;
}

/** One that is under way, or failed a moment ago. */
function Under({ one }) {
  if (one.state === "failed") return html`<p class="alert bad" role="alert"><b>${one.target}</b> <${Badge} state="failed" /> ${one.error ? one.error.message : ""} (${ago(one.ended_s)})</p>`;
  const { done, total, unit, message } = one.progress || {};
  const sized = (count) => (unit === "bytes" ? bytes(count) : number(count));
  const far = total ? t("of", { a: sized(done), b: sized(total) }) : "";
  return html`<${Meter} label=${[one.target, message].filter(Boolean).join(": ")} part=${total ? done / total : 0} text=${far} />`;
}
