// What changes at the box, by its event stream: one stream for each tab that is seen, while something on it is live. Who
// follows asks again when told; without a stream it asks every few seconds.
import { BoxError, changes } from "./api.js";

const SOONEST_MS = 1000;
const LATEST_MS = 30000;
const HIDDEN_MS = 5000;

const followers = new Set();
let last = "";
let streaming = null; // the AbortController of the stream
let open = false;
let again = 0;
let hiding = 0;

/** Calls `told(why)` when something of `topics` ("jobs", or "jobs/ID") changed, or when the stream came or went. Returns
 *  a function that ends it. */
export function follow(topics, told) {
  const one = { topics: topics.map((topic) => topic.split("/")), told };
  followers.add(one);
  begin();
  return () => {
    followers.delete(one);
    if (!followers.size) setTimeout(() => { if (!followers.size) end(); }, SOONEST_MS);
  };
}

/** Whether changes are told of now. */
export const isOpen = () => open;

/** The login ended: what was seen is another's. */
export function forget() {
  end();
  last = "";
}

function tell(changed) {
  for (const one of [...followers]) {
    const hit = !changed || one.topics.some(([topic, id]) => {
      const ids = changed[topic];
      return ids && (!id || !ids.length || ids.includes(id));
    });
    if (hit) one.told();
  }
}

function end() {
  clearTimeout(again);
  again = 0;
  if (streaming) streaming.abort();
  streaming = null;
  open = false;
}

function begin() {
  if (!streaming && !again && !document.hidden && followers.size) run(0);
}

async function run(failed) {
  again = 0;
  const mine = new AbortController();
  streaming = mine;
  let tries = failed;
  let pause = 0;
  try {
    for await (const event of changes(last, mine.signal)) {
      if (streaming !== mine) return;
      tries = 0;
      if (event.id) last = event.id;
      if (!open || event.kind === "reload") {
        open = true;
        tell(null);
      } else if (event.kind === "changed") {
        tell(event.data);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") return;
    if (!(error instanceof BoxError)) throw error;
    pause = error.status === 403 || error.status === 429 ? LATEST_MS : 0;
  }
  if (streaming !== mine) return;
  streaming = null;
  const was = open;
  open = false;
  if (was) tell(null); // they ask by themselves until it is back
  if (document.hidden || !followers.size) return;
  again = setTimeout(run, Math.max(pause, Math.min(LATEST_MS, SOONEST_MS * 2 ** tries)), tries + 1);
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  // A browser opens six connections to a box, and each tab that is open but not seen would hold one of them.
  if (document.hidden) hiding = setTimeout(end, HIDDEN_MS);
  else begin();
});
