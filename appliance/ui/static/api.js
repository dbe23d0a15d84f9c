// Speaks to the box: /admin/v1 and /v1, by a login that a key was exchanged for. One half of its token is a cookie that
// no script reads; the other is kept by this origin and goes with each request as a header. The key itself is kept nowhere.

const KEPT = "appliance-login";
const GONE = "appliance-gone"; // to the login provider, and not back yet
let login = kept();
let onRefused = () => {};

/** An error in the box's words. status: 0 where no answer came. retryAfter: seconds, 0 if none was given. */
export class BoxError extends Error {
  constructor(status, message, code = null, param = null, retryAfter = 0) {
    super(message);
    Object.assign(this, { status, code, param, retryAfter });
  }
}

function kept() {
  try {
    return localStorage.getItem(KEPT) || "";
  } catch {
    return ""; // a browser that keeps nothing: a reload ends the login
  }
}

function keep(value) {
  login = value;
  try {
    if (value) localStorage.setItem(KEPT, value);
    else localStorage.removeItem(KEPT);
  } catch {
    // as above
  }
}

export const isLoggedIn = () => Boolean(login);
export const loginId = () => login.split(".")[0];

/** refused: called once the box no longer takes the login, or another tab has ended it. */
export function whenRefused(refused) {
  onRefused = refused;
}

addEventListener("storage", (event) => {
  if (event.key === KEPT && !event.newValue && event.oldValue === login && login) onRefused();
});

/** Exchanges a key for a login. Throws BoxError. */
export async function logIn(key) {
  keep("");
  const headers = { authorization: `Bearer ${key}` };
  const made = await (await send("POST", "/admin/v1/sessions", { body: { secure: location.protocol === "https:" }, headers })).json();
  keep(`${made.id}.${made.page}`);
}

/** What the box calls its login provider, "" where there is none. */
export const providerName = async () => (await call("GET", "/admin/v1/oidc")).name || "";

/** Goes to the login provider. Throws BoxError. */
export async function goToProvider() {
  const { url, binder } = await call("POST", "/admin/v1/oidc/begin");
  localStorage.setItem(GONE, binder);
  location.assign(url);
}

/** Whether this browser went there and is not back yet. */
export const isGone = () => Boolean(localStorage.getItem(GONE));
export const stay = () => localStorage.removeItem(GONE);

/** Comes back from the login provider with what it gave. Throws BoxError. */
export async function comeBack(code, state) {
  const binder = localStorage.getItem(GONE);
  stay();
  const made = await call("POST", "/admin/v1/oidc/finish", { code, state, binder, secure: location.protocol === "https:" });
  keep(`${made.id}.${made.page}`);
}

/** Ends the login, here at once and at the box when it hears of it. */
export function logOut() {
  if (login) call("DELETE", `/admin/v1/sessions/${loginId()}`).catch(() => {});
  forgetLogin();
}

export function forgetLogin() {
  onRefused = () => {};
  keep("");
}

async function send(method, path, { body, signal, headers = {} } = {}) {
  const sent = login ? { ...headers, "x-appliance-page": login } : { ...headers };
  let content = body;
  if (body !== undefined && !(body instanceof FormData)) {
    sent["content-type"] = "application/json";
    content = JSON.stringify(body);
  }
  const used = login;
  let answer;
  try {
    answer = await fetch(path, { method, headers: sent, body: content, signal, credentials: "same-origin", cache: "no-store", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new BoxError(0, "");
  }
  if (!answer.ok) {
    const error = await errorOf(answer);
    if (answer.status === 401 && used === login && login) onRefused();
    throw error;
  }
  return answer;
}

async function errorOf(answer) {
  let told = {};
  try {
    told = (await answer.json()).error || {};
  } catch {
    // Something between the page and the box answered; its status is all that is known.
  }
  const after = Number(answer.headers.get("retry-after")) || 0;
  return new BoxError(answer.status, told.message || `${answer.status} ${answer.statusText}`, told.code, told.param, after);
}

/** The JSON that the box answers with. Throws BoxError. */
export async function call(method, path, body, signal) {
  return (await send(method, path, { body, signal })).json();
}

export const get = (path, signal) => call("GET", path, undefined, signal);
export const post = (path, body = undefined) => call("POST", path, body);

/** Uploads a file of training data. */
export async function upload(file) {
  const form = new FormData();
  form.append("purpose", "fine-tune");
  form.append("file", file);
  return call("POST", "/v1/files", form);
}

/** A streamed chat. Yields {head}, then {held} for each comment that says so, {text}, {reasoning}, {usage}, {end}.
 *  Throws BoxError, also for an error event within the stream. */
export async function* streamChat(body, signal) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const answer = await send("POST", "/v1/chat/completions", { body: asked, signal });
  yield { head: { version: answer.headers.get("x-appliance-model-version") } };
  for await (const event of eventsOf(answer)) yield* told(event);
}

/** The texts of an answer's Server-Sent Events, comments too. Throws BoxError. */
async function* eventsOf(answer) {
  const reader = answer.body.getReader();
  const decoder = new TextDecoder();
  let buffered = "";
  let done = false;
  while (!done) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new BoxError(0, "");
    }
    done = part.done;
    buffered += part.value ? decoder.decode(part.value, { stream: true }) : "";
    const events = buffered.split("\n\n");
    buffered = events.pop();
    yield* events;
  }
}

function* told(event) {
  for (const line of event.split("\n")) {
    if (line.startsWith(": held")) yield { held: true };
    if (line.startsWith(": version ")) yield { head: { version: line.slice(10) } };
    if (!line.startsWith("data: ")) continue;
    if (line === "data: [DONE]") continue;
    const chunk = JSON.parse(line.slice(6));
    if (chunk.error) throw new BoxError(500, chunk.error.message, chunk.error.code);
    const choice = chunk.choices && chunk.choices[0];
    const delta = (choice && choice.delta) || {};
    const reasoning = delta.reasoning || delta.reasoning_content;
    if (reasoning) yield { reasoning };
    if (delta.content) yield { text: delta.content };
    if (choice && choice.finish_reason) yield { end: choice.finish_reason };
    if (chunk.usage) yield { usage: chunk.usage };
  }
}
