// Who held which device when, from the journal of hand-overs and from who holds them now. Pure.

const LEAST_S = 10;
const MOST_S = 7 * 86400;

/** What is looked at: `span` seconds up to `until`, a Unix time; null: up to now, as it goes on. */
const viewOf = (span, until, now) => ({ span: Math.max(LEAST_S, Math.min(MOST_S, span)), until: until < now ? until : null });

/** The same length, earlier or later by a share of it. */
export const moved = ({ span, until }, now, share) => viewOf(span, (until ?? now) + share * span, now);

/** `times` as long. What goes on stays in view; else the middle does. */
export function scaled({ span, until }, now, times) {
  if (until === null) return viewOf(span * times, now, now);
  const middle = until - span / 2;
  const view = viewOf(span * times, now, now);
  return viewOf(view.span, middle + view.span / 2, now);
}

export const between = (since, until, now) => viewOf(until - since, until - since < LEAST_S ? (since + until + LEAST_S) / 2 : until, now);

const kindOf = { job: "train", replica: "serve" };

/** A holder as its lease names it in a step's target: "3:job:ftjob-…". */
function holderOf(target) {
  const [, kind, ...id] = (target || "").split(":");
  return kindOf[kind] ? { kind: kindOf[kind], id: id.join(":") } : null;
}

/** lanes: [{device, spans: [{kind, name, from, to}]}] between two moments (Unix time); moves: the hand-overs there. */
export function lanesOf(handovers, status, since, until) {
  const models = new Map(status.replicas.map((one) => [one.id, one.model]));
  const jobs = new Map(status.jobs.map((one) => [one.id, one.output_model]));
  const changes = [];
  for (const handover of handovers) {
    for (const step of handover.steps) {
      const detail = step.detail || {};
      if (detail.model && step.verb.endsWith("_replica") && !models.has(step.target)) models.set(step.target, detail.model);
      if (step.state !== "done" || !detail.devices || (step.verb !== "acquire" && step.verb !== "release")) continue;
      const holder = holderOf(step.target);
      for (const device of detail.devices) changes.push({ device, time: step.ended_s, holder, takes: step.verb === "acquire" });
    }
  }
  changes.sort((a, b) => a.time - b.time);
  const named = (holder) => (holder.kind === "serve" ? models.get(holder.id) : jobs.get(holder.id)) || holder.id;
  const lanes = status.devices.map((device) => ({ device: device.id, spans: spansOf(changes.filter((one) => one.device === device.id), device, named, { since, until, started: status.box.started_s }) }));
  const moves = handovers.filter((one) => (one.ended_s ?? until) > since && one.steps.length);
  return { lanes, moves };
}

function spansOf(changes, device, named, { since, until, started }) {
  const spans = [];
  const now = device.holder ? { kind: kindOf[device.holder.kind], id: device.holder.id } : null;
  // Before the first change in the journal the device was its releaser's, or nobody's; without any it is as it is now.
  let holder = changes.length ? (changes[0].takes ? null : changes[0].holder) : now;
  let from = since;
  const add = (to) => {
    const begin = Math.max(from, since);
    if (Math.min(to, until) > begin) spans.push({ kind: holder ? holder.kind : "free", name: holder ? named(holder) : "", from: begin, to: Math.min(to, until) });
    from = Math.max(from, to);
  };
  // Who held it when the box stopped is in no journal: that one had it until the box began again, at the latest.
  const lose = (to) => {
    if (!holder || !(from < started && started < to)) return;
    add(started);
    holder = null;
  };
  for (const change of changes) {
    if (change.takes) lose(change.time);
    add(change.time);
    holder = change.takes ? change.holder : null;
  }
  if (!now || (holder && holder.id !== now.id)) lose(until);
  add(until);
  return spans;
}
