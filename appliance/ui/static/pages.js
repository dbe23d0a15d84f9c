// All pages. They are fetched once somebody is logged in, all together: a page that is open goes on through an upgrade.
import { Audit } from "./pages/audit.js";
import { Box } from "./pages/box.js";
import { Chat } from "./pages/chat.js";
import { Data } from "./pages/data.js";
import { Evals } from "./pages/evals.js";
import { Health } from "./pages/health.js";
import { Jobs } from "./pages/jobs.js";
import { Keys } from "./pages/keys.js";
import { Models } from "./pages/models.js";
import { Pipelines } from "./pages/pipelines.js";
import { Queue } from "./pages/queue.js";
import { Timeline } from "./pages/timeline.js";

// In the order of the navigation. scopes: any of them shows the page; admin sees all.
export const PAGES = [
  { id: "box", scopes: ["read"], page: Box },
  { id: "jobs", scopes: ["fine_tuning", "read"], page: Jobs },
  { id: "data", scopes: ["fine_tuning"], page: Data },
  { id: "pipelines", scopes: ["fine_tuning"], page: Pipelines },
  { id: "evals", scopes: ["fine_tuning"], page: Evals },
  { id: "chat", scopes: ["inference"], page: Chat },
  { id: "models", scopes: ["read"], page: Models },
  { id: "timeline", scopes: ["read"], page: Timeline },
  { id: "keys", scopes: ["inference", "fine_tuning", "read"], page: Keys },
  { id: "queue", scopes: ["read", "inference"], page: Queue },
  { id: "health", scopes: ["read"], page: Health },
  { id: "audit", scopes: ["admin"], page: Audit },
];
