// Begins the page: the language, who is there, the navigation, and the page that the address names.
import { BoxError, comeBack, forgetLogin, get, goToProvider, isGone, isLoggedIn, logIn, logOut, providerName, stay, whenRefused } from "./api.js";
import { LANGUAGES, language, loadLanguage, t } from "./i18n.js";
import { PAGES, fetchPage } from "./pages.js";
import { Component, NeedsScope, Who, html, render, sentence, useEffect, useRef, useState } from "./ui.js";

const ASKED_AGAIN = 15; // times, of a box that starts

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
  const [provider, setProvider] = useState("");
  const field = useRef(null);
  useEffect(() => {
    field.current.focus();
    providerName().then(setProvider, () => {}); // without one, or while the box is away, there is the key
  }, []);
  const enter = (event) => {
    event.preventDefault();
    const key = field.current.value.trim();
    if (!/^[\x21-\x7e]+$/.test(key)) {
      setError(t("login.empty"));
      return;
    }
    setBusy(true);
    const refused = (word) => (failure) => {
      forgetLogin();
      setBusy(false);
      setError(failure instanceof BoxError && failure.status === 401 ? t(word) : sentence(failure));
      field.current.focus();
    };
    logIn(key).then(() => get("/admin/v1/me").then(onIn, refused("login.no_cookies")), refused("login.refused"));
  };
  return html`<main class="login" id="main">
    <form class="card" onSubmit=${enter}>
      <h1><span class="mark" aria-hidden="true"></span>appliance</h1>
      <p>${t("login.what")}</p>
      ${window.isSecureContext ? null : html`<p class="alert warm">${t("login.insecure")}</p>`}
      <label class="field"><span>${t("login.key")}</span>
        <input ref=${field} type="password" name="key" autocomplete="off" spellcheck=${false} autocapitalize="off" placeholder="sk-appl-…" aria-describedby="login-error" required />
      </label>
      <p id="login-error" class=${error ? "alert bad" : "visually-hidden"} role="alert">${error}</p>
      <button class="main" disabled=${busy}>${busy ? t("login.busy") : t("login.enter")}</button>
      ${provider ? html`<button type="button" disabled=${busy} onClick=${() => goToProvider().catch((failure) => setError(sentence(failure)))}>${t("login.by", { provider })}</button>` : null}
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

/** The page once it is fetched, then all others. */
function Fetched({ page, rest, shown }) {
  const [{ failed }, redrawn] = useState({ failed: null });
  useEffect(() => {
    let over = false;
    const told = (error) => { if (!over) redrawn({ failed: error }); };
    fetchPage(page).then(() => {
      told(null);
      for (const one of shown) fetchPage(one).catch(() => {}); // it is tried again where somebody goes there
    }, told);
    return () => { over = true; };
  }, [page.id]);
  if (page.draw) return html`<${page.draw} rest=${rest} />`;
  return failed ? html`<p class="alert bad" role="alert">${t("error.unreachable")}</p>` : html`<p class="loading" role="status">${t("loading")}</p>`;
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
        <button type="button" class="plain" onClick=${onOut}>${t("logout")}</button>
        <${Language} />
      </div>
    </aside>
    <main id="main">
      <h1 ref=${heading} tabindex="-1">${t(`nav.${page.id}`)}</h1>
      <${Guarded} key=${[page.id, ...place.rest].join("/")}>
        ${sees(who, page) ? html`<${Fetched} page=${page} rest=${place.rest} shown=${shown} />` : html`<${NeedsScope} scopes=${page.scopes} />`}
      </${Guarded}>
    </main>
  </${Who.Provider}>`;
}

function App({ known, failed }) {
  const [who, setWho] = useState(known);
  const [told, setTold] = useState(failed);
  const leave = (why) => {
    setTold(why);
    setWho(null);
  };
  useEffect(() => {
    if (who) whenRefused(() => { forgetLogin(); leave(t("login.ended")); });
  }, [who]);
  return who ? html`<${Shell} who=${who} onOut=${() => { logOut(); leave(""); }} />` : html`<${Login} told=${told} onIn=${(found) => { setTold(""); setWho(found); }} />`;
}

/** Who is logged in since before a reload: {known} or {failed}, a sentence. */
async function whoIsThere() {
  const came = new URLSearchParams(location.search);
  // What an address says counts only for who went to the provider: anybody may write one.
  if ((came.has("code") || came.has("error")) && isGone()) {
    history.replaceState(null, "", location.pathname);
    if (!came.has("code")) {
      stay();
      return { known: null, failed: t("login.provider_refused", { why: came.get("error_description") || came.get("error") }) };
    }
    try {
      await comeBack(came.get("code"), came.get("state") || "-");
    } catch (error) {
      return { known: null, failed: sentence(error) };
    }
  }
  if (!isLoggedIn()) return { known: null, failed: "" };
  for (let tried = 1; ; tried += 1) {
    try {
      return { known: await get("/admin/v1/me"), failed: "" };
    } catch (error) {
      if (error.status === 401) {
        forgetLogin();
        return { known: null, failed: t("login.ended") };
      }
      if (tried === ASKED_AGAIN) return { known: null, failed: sentence(error) }; // the login stays, for when the box answers
      root.textContent = sentence(error);
      await new Promise((later) => setTimeout(later, 2000));
    }
  }
}

const root = document.getElementById("app");

function redraw() {
  render(html`<${App} key="app" turn=${language} ...${there} />`, root);
}

await loadLanguage();
const there = await whoIsThere();
root.textContent = "";
redraw();
