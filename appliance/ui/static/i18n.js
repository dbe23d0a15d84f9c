// The page's words, from one catalogue for each language. A test holds the catalogues against each other and the code.

export const LANGUAGES = { en: "English", "zh-CN": "简体中文" };
const REMEMBERED = "appliance-language";

let words = {};
export let language = "en";

/** Load a language's catalogue; without one, the remembered, else the browser's. */
export async function loadLanguage(asked) {
  const wanted = asked || remembered() || (navigator.languages || []).map(known).find(Boolean) || "en";
  const answer = await fetch(new URL(`./i18n/${wanted}.json`, import.meta.url));
  if (!answer.ok) throw new Error(`${wanted}.json: ${answer.status}`);
  words = await answer.json();
  language = wanted;
  document.documentElement.lang = wanted;
  if (asked) remember(asked);
}

function known(tag) {
  if (tag.toLowerCase().startsWith("zh")) return "zh-CN";
  return tag.toLowerCase().startsWith("en") ? "en" : undefined;
}

function remembered() {
  try {
    const found = localStorage.getItem(REMEMBERED);
    return found in LANGUAGES ? found : undefined;
  } catch {
    return undefined; // a browser that keeps nothing: its own language then
  }
}

function remember(asked) {
  try {
    localStorage.setItem(REMEMBERED, asked);
  } catch {
    // as above
  }
}

/** The catalogue's text of `name`, or else what the box itself says. */
export const translated = (name, said) => words[name] ?? said;

/** The text of `name`, with {places} filled in from `values`. */
export function t(name, values = {}) {
  const text = words[name];
  if (text === undefined) return name;
  return text.replace(/\{(\w+)\}/g, (_, place) => String(values[place] ?? ""));
}
