// What all pages are made of: hooks that keep data fresh, and small accessible parts.
import { Component, h, html, render, createContext, useCallback, useContext, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";
import { BoxError } from "./api.js";
import { ago, number } from "./format.js";
import { t } from "./i18n.js";

export { Component, h, html, render, createContext, useCallback, useContext, useEffect, useLayoutEffect, useMemo, useRef, useState };

/** Who is at the page: {name, owner, scopes, models}. */
export const Who = createContext(null);

/** Whether this person's key has one of `scopes`; admin has all. */
export function useMay(...scopes) {
  const who = useContext(Who);
  return who.scopes.includes("admin") || scopes.some((scope) => who.scopes.includes(scope));
}

const HIDDEN_S = 10; // between two questions of a tab that is not seen

/** `ask(signal)` at once and every `seconds`, less often while the tab is hidden. The last answer stays when one fails.
 *  Returns {data, error, reload}; asks again at once when `inputs` change. */
export function useLive(ask, seconds, inputs = []) {
  const [state, setState] = useState({ data: null, error: null });
  const again = useRef(() => {});
  useEffect(() => {
    let timer = 0;
    let asking = null;
    let over = false;
    setState({ data: null, error: null });
    const look = async () => {
      clearTimeout(timer);
      if (asking) asking.abort();
      const mine = new AbortController();
      asking = mine;
      try {
        const data = await ask(mine.signal);
        if (!over && asking === mine) setState({ data, error: null });
      } catch (error) {
        if (over || asking !== mine || error.name === "AbortError") return;
        setState((before) => ({ data: before.data, error }));
      }
      asking = null;
      if (!over) timer = setTimeout(look, 1000 * (document.hidden ? Math.max(seconds, HIDDEN_S) : seconds));
    };
    const seen = () => { if (!document.hidden) look(); };
    again.current = look;
    document.addEventListener("visibilitychange", seen);
    look();
    return () => {
      over = true;
      clearTimeout(timer);
      if (asking) asking.abort();
      document.removeEventListener("visibilitychange", seen);
    };
  }, inputs);
  return { ...state, reload: () => again.current() };
}

/** An act of the person's: [run, {busy, error}]. `run` never throws; it returns what `act` did, undefined if it failed. */
export function useAct(act) {
  const [state, setState] = useState({ busy: false, error: null });
  const there = useRef(true);
  useEffect(() => () => { there.current = false; }, []);
  const run = async (...given) => {
    setState({ busy: true, error: null });
    try {
      const done = await act(...given);
      if (there.current) setState({ busy: false, error: null });
      return done;
    } catch (error) {
      if (there.current) setState({ busy: false, error });
      if (!(error instanceof BoxError)) throw error;
      return undefined;
    }
  };
  return [run, state];
}

/** A failure as a sentence; the box's own where it gave one. */
export function sentence(error) {
  if (!(error instanceof BoxError)) return t("error.page", { message: error.message });
  if (error.status === 0) return t("error.unreachable");
  return error.retryAfter ? `${error.message} ${t("error.retry", { n: error.retryAfter })}` : error.message;
}

export function Failure({ error }) {
  return error ? html`<p class="alert bad" role="alert">${sentence(error)}</p>` : null;
}

/** What a person reads in place of a page or a part that needs another scope. */
export function NeedsScope({ scopes }) {
  const named = scopes.join(` ${t("or")} `);
  return html`<p class="alert quiet">${t("scope.needed", { scopes: named })}</p>`;
}

/** The state of something live: loading, failed, or what `children` draws of it. In an element of its own: what came
 *  first of two side by side was put before all else. */
export function Live({ of, children }) {
  return html`<div>
    <${Failure} error=${of.error} />
    ${of.data === null ? (of.error ? null : html`<p class="loading" role="status">${t("loading")}</p>`) : children(of.data)}
  </div>`;
}

const SHADES = {
  open: "good", ok: "good", running: "good", succeeded: "good", done: "good", completed: "good", promoted: "good", ready: "good",
  queued: "calm", suspended: "calm", paused: "calm", pausing: "calm", asleep: "calm", cold: "calm", validating: "calm", in_progress: "good",
  starting: "warm", draining: "warm", cancelling: "warm", waking: "warm", warn: "warm", finalizing: "warm", held: "warm",
  failed: "bad", dead: "bad", fail: "bad", error: "bad", undone: "bad", lost: "bad", expired: "bad", "rolled back": "warm",
  cancelled: "dim", skip: "dim", stopped: "dim", revoked: "dim",
};

/** A word for a state, in a colour and never by colour alone. */
export function Badge({ state, children }) {
  return html`<span class=${`badge ${SHADES[state] || "dim"}`}>${children || stateWord(state)}</span>`;
}

export function stateWord(state) {
  const name = `state.${String(state).replace(/ /g, "_")}`;
  const text = t(name);
  return text === name ? state : text;
}

/** One of `degraded` of /admin/v1/status as a sentence. */
export function degradedWord(one) {
  return t("box.degraded", { what: one.name, n: number(one.failures), time: ago(one.since_s), why: one.why });
}

/** A part of a page with its heading. */
export function Card({ title, aside, children, class: more = "" }) {
  return html`<section class=${`card ${more}`}>
    ${title || aside ? html`<header>${title ? html`<h2>${title}</h2>` : null}${aside ? html`<div class="aside">${aside}</div>` : null}</header>` : null}
    ${children}
  </section>`;
}

const FIT_A_PHONE = 3; // columns

/** columns: [heading, cell(row), class]; a column without a heading has buttons. Of more columns than fit a phone, each
 *  row is shown there as a list of its cells with their headings: the roles say that it is a table all the same. */
export function Table({ label, columns, rows, empty, rowKey }) {
  if (!rows.length) return html`<p class="empty">${empty}</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}>
    <table role="table" class=${columns.length > FIT_A_PHONE ? "stacks" : ""}>
      <thead role="rowgroup"><tr role="row">${columns.map(([heading, , kind]) => html`<th scope="col" role="columnheader" class=${kind}>${heading || html`<span class="visually-hidden">${t("acts")}</span>`}</th>`)}</tr></thead>
      <tbody role="rowgroup">
        ${rows.map((row, place) => html`<tr role="row" key=${rowKey ? rowKey(row) : place}>
          ${columns.map(([heading, cell, kind]) => html`<td role="cell" class=${kind} data-heading=${heading}>${cell(row)}</td>`)}
        </tr>`)}
      </tbody>
    </table>
  </div>`;
}

/** pairs: [name, value]; those without a value are left out. */
export function Facts({ pairs }) {
  return html`<dl class="facts">
    ${pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}

/** label: what is measured; text: the value as read. */
export function Meter({ label, part, text, shade = "" }) {
  const share = Math.max(0, Math.min(1, part || 0));
  return html`<div class=${`meter ${shade}`}>
    <div class="words"><span>${label}</span><span>${text}</span></div>
    <div class="track" role="progressbar" aria-label=${label} aria-valuemin="0" aria-valuemax="100" aria-valuenow=${Math.round(100 * share)} aria-valuetext=${text}>
      <div style=${{ width: `${100 * share}%` }}></div>
    </div>
  </div>`;
}

/** A control with its label; hint: a sentence below it. */
export function Field({ label, hint, children, class: more = "" }) {
  return html`<label class=${`field ${more}`}><span>${label}</span>${children}${hint ? html`<small>${hint}</small>` : null}</label>`;
}

/** Modal; Escape and the button close it, and focus returns to where it was. */
export function Dialog({ title, onClose, children }) {
  const element = useRef(null);
  useEffect(() => {
    const before = document.activeElement;
    element.current.showModal();
    return () => before && before.focus && before.focus();
  }, []);
  return html`<dialog ref=${element} aria-label=${title} onClose=${onClose} onCancel=${onClose}>
    <header><h2>${title}</h2><button type="button" class="plain" aria-label=${t("close")} onClick=${() => element.current.close()}>✕</button></header>
    ${children}
  </dialog>`;
}

/** A button for what cannot be undone: it asks once more in place. */
export function Sure({ label, question, onYes, busy, class: more = "" }) {
  const [asked, setAsked] = useState(false);
  if (!asked) return html`<button type="button" class=${more} disabled=${busy} onClick=${() => setAsked(true)}>${label}</button>`;
  return html`<span class="sure" role="group" aria-label=${question}>
    <span>${question}</span>
    <button type="button" class="bad" disabled=${busy} onClick=${() => { setAsked(false); onYes(); }}>${label}</button>
    <button type="button" autofocus onClick=${() => setAsked(false)}>${t("keep")}</button>
  </span>`;
}

export function Copy({ text }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setDone(true);
    setTimeout(() => setDone(false), 2000);
  };
  if (!navigator.clipboard) return null; // only where the connection is secure
  return html`<button type="button" onClick=${copy}>${done ? t("copied") : t("copy")}</button>`;
}
