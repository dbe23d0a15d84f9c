// Begins the page: the language, who is there, the navigation, and the page that the address names.
import { BoxError, forgetKey, get, useKey } from "./api.js";
import { LANGUAGES, language, loadLanguage, t } from "./i18n.js";
import { Component, NeedsScope, Who, html, render, sentence, useEffect, useRef, useState } from "./ui.js";
import { Audit } from "./pages/audit.js";
import { Box } from "./pages/box.js";
import { Chat } from "./pages/chat.js";
import { Health } from "./pages/health.js";
import { Jobs } from "./pages/jobs.js";
import { Keys } from "./pages/keys.js";
import { Models } from "./pages/models.js";
import { Queue } from "./pages/queue.js";
import { Timeline } from "./pages/timeline.js";

// In the order of the navigation. scopes: any of them shows the page; admin sees all.
const PAGES = [
  { id: "box", scopes: ["read"], page: Box },
  { id: "jobs", scopes: ["fine_tuning", "read"], page: Jobs },
  { id: "chat", scopes: ["inference"], page: Chat },
  { id: "models", scopes: ["read"], page: Models },
  { id: "timeline", scopes: ["read"], page: Timeline },
  { id: "keys", scopes: ["inference", "fine_tuning", "read"], page: Keys },
  { id: "queue", scopes: ["read", "inference"], page: Queue },
  { id: "health", scopes: ["read"], page: Health },
  { id: "audit", scopes: ["admin"], page: Audit },
];

const IDLE_MS = 8 * 3600 * 1000;

/** The page's id and what follows it, of an address like #/jobs/ID. */
function placeOf(hash) {
  const [id, ...rest] = hash.replace(/^#\/?/, "").split("/").map(decoded);
  return { id, rest };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // an address that somebody cut short
  }
}

function usePlace() {
  const [place, setPlace] = useState(() => placeOf(location.hash));
  useEffect(() => {
    const moved = () => setPlace(placeOf(location.hash));
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  return place;
}

const sees = (who, page) => who.scopes.includes("admin") || page.scopes.some((scope) => who.scopes.includes(scope));

function Login({ told, onIn }) {
  const [error, setError] = useState(told);
  const [busy, setBusy] = useState(false);
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);
  const enter = async (event) => {
    event.preventDefault();
    const key = field.current.value.trim();
    if (!/^[\x21-\x7e]+$/.test(key)) {
      setError(t("login.empty"));
      return;
    }
    setBusy(true);
    useKey(key, () => {});
    try {
      const who = await get("/admin/v1/me");
      onIn(key, who);
    } catch (failure) {
      forgetKey();
      setBusy(false);
      setError(failure instanceof BoxError && failure.status === 401 ? t("login.refused") : sentence(failure));
      field.current.focus();
    }
  };
  return html`<main class="login" id="main">
    <form class="card" onSubmit=${enter}>
      <h1><span class="mark" aria-hidden="true"></span>appliance</h1>
      <p>${t("login.what")}</p>
      ${window.isSecureContext ? null : html`<p class="alert warm">${t("login.insecure")}</p>`}
      <label class="field"><span>${t("login.key")}</span>
        <input ref=${field} type="password" name="key" autocomplete="off" spellcheck="false" autocapitalize="off" placeholder="sk-appl-…" aria-describedby="login-error" required />
      </label>
      <p id="login-error" class=${error ? "alert bad" : "visually-hidden"} role="alert">${error}</p>
      <button class="main" disabled=${busy}>${busy ? t("login.busy") : t("login.enter")}</button>
      <small>${t("login.where")}</small>
      <${Language} />
    </form>
  </main>`;
}

function Language() {
  return html`<label class="language"><span class="visually-hidden">${t("language")}</span>
    <select onChange=${(event) => loadLanguage(event.target.value).then(redraw)}>
      ${Object.entries(LANGUAGES).map(([tag, name]) => html`<option value=${tag} lang=${tag} selected=${tag === language}>${name}</option>`)}
    </select>
  </label>`;
}

/** Draws a sentence where a page's own code failed, and the rest of the page goes on. */
class Guarded extends Component {
  componentDidCatch(error) {
    this.setState({ error });
  }

  render({ children }, { error }) {
    return error ? html`<p class="alert bad" role="alert">${sentence(error)}</p>` : children;
  }
}

function Shell({ who, onOut }) {
  const place = usePlace();
  const heading = useRef(null);
  const shown = PAGES.filter((page) => sees(who, page));
  const page = PAGES.find((one) => one.id === place.id) || shown[0] || PAGES[0];
  const first = useRef(true);
  useEffect(() => {
    // A key in a page that was left open is a key for whoever comes by.
    let timer = 0;
    const seen = () => {
      clearTimeout(timer);
      timer = setTimeout(() => onOut(t("login.idle")), IDLE_MS);
    };
    const signs = ["pointerdown", "keydown", "wheel"];
    signs.forEach((sign) => addEventListener(sign, seen, { passive: true }));
    seen();
    return () => {
      clearTimeout(timer);
      signs.forEach((sign) => removeEventListener(sign, seen));
    };
  }, []);
  useEffect(() => {
    document.title = `${t(`nav.${page.id}`)} · appliance`;
    const current = document.querySelector("nav a[aria-current]");
    if (current) current.scrollIntoView({ block: "nearest", inline: "center" });
    // A screen reader begins at the new page's heading; not on arrival, where the browser begins by itself.
    if (!first.current && heading.current) heading.current.focus();
    first.current = false;
  }, [page.id, language]);
  return html`<${Who.Provider} value=${who}>
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); heading.current.focus(); }}>${t("skip")}</a>
    <aside class="side">
      <a class="brand" href="#/"><span class="mark" aria-hidden="true"></span>appliance</a>
      <nav aria-label=${t("nav")}>
        ${shown.map((one) => html`<a key=${one.id} href=${`#/${one.id}`} aria-current=${one === page ? "page" : undefined}>${t(`nav.${one.id}`)}</a>`)}
      </nav>
      <div class="who">
        <span title=${t("who.scopes", { scopes: who.scopes.join(", ") })}>${who.name}</span>
        <button type="button" class="plain" onClick=${() => onOut("")}>${t("logout")}</button>
        <${Language} />
      </div>
    </aside>
    <main id="main">
      <h1 ref=${heading} tabindex="-1">${t(`nav.${page.id}`)}</h1>
      <${Guarded} key=${[page.id, ...place.rest].join("/")}>
        ${sees(who, page) ? html`<${page.page} rest=${place.rest} />` : html`<${NeedsScope} scopes=${page.scopes} />`}
      </${Guarded}>
    </main>
  </${Who.Provider}>`;
}

function App() {
  const [who, setWho] = useState(null);
  const [told, setTold] = useState("");
  const leave = (why) => {
    forgetKey();
    setTold(why);
    setWho(null);
  };
  const enter = (key, found) => {
    useKey(key, () => leave(t("login.ended")));
    setTold("");
    setWho(found);
  };
  return who ? html`<${Shell} who=${who} onOut=${leave} />` : html`<${Login} told=${told} onIn=${enter} />`;
}

const root = document.getElementById("app");

function redraw() {
  render(html`<${App} key="app" turn=${language} />`, root);
}

await loadLanguage();
root.textContent = "";
redraw();
