// Who held which device when, from the journal of hand-overs and from who holds them now. Pure.

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
  const lanes = status.devices.map((device) => ({ device: device.id, spans: spansOf(changes.filter((one) => one.device === device.id), device, named, since, until) }));
  const moves = handovers.filter((one) => (one.ended_s ?? until) > since && one.steps.length);
  return { lanes, moves };
}

function spansOf(changes, device, named, since, until) {
  const spans = [];
  // Before the first change in the journal the device was its releaser's, or nobody's.
  let holder = changes.length && !changes[0].takes ? changes[0].holder : null;
  let from = since;
  const add = (to) => {
    const begin = Math.max(from, since);
    if (to > begin) spans.push({ kind: holder ? holder.kind : "free", name: holder ? named(holder) : "", from: begin, to });
  };
  for (const change of changes) {
    add(Math.min(change.time, until));
    holder = change.takes ? change.holder : null;
    from = change.time;
  }
  // What is so now is so, whatever the journal no longer has.
  const now = device.holder ? { kind: kindOf[device.holder.kind], id: device.holder.id } : null;
  if (!changes.length) holder = now;
  add(until);
  return spans;
}
