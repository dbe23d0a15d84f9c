// All pages. The one that is looked at is fetched first and the others right behind it: a page that is open goes on through
// an upgrade.

// In the order of the navigation. scopes: any of them shows the page; admin sees all.
export const PAGES = [
  { id: "box", scopes: ["read"], fetched: () => import("./pages/box.js") },
  { id: "jobs", scopes: ["fine_tuning", "read"], fetched: () => import("./pages/jobs.js") },
  { id: "data", scopes: ["fine_tuning"], fetched: () => import("./pages/data.js") },
  { id: "evals", scopes: ["fine_tuning"], fetched: () => import("./pages/evals.js") },
  { id: "chat", scopes: ["inference"], fetched: () => import("./pages/chat.js") },
  { id: "models", scopes: ["read"], fetched: () => import("./pages/models.js") },
  { id: "timeline", scopes: ["read"], fetched: () => import("./pages/timeline.js") },
  { id: "keys", scopes: ["inference", "fine_tuning", "read"], fetched: () => import("./pages/keys.js") },
  { id: "queue", scopes: ["read", "inference"], fetched: () => import("./pages/queue.js") },
  { id: "health", scopes: ["read"], fetched: () => import("./pages/health.js") },
  { id: "logs", scopes: ["admin"], fetched: () => import("./pages/logs.js") },
  { id: "audit", scopes: ["admin"], fetched: () => import("./pages/audit.js") },
];

/** Fetches what draws a page, once. */
export async function fetchPage(page) {
  page.draw ??= (await page.fetched()).Page;
}
