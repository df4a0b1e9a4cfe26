// A table of the requests that run and of those that ended, the newest first.

import { byId, make, say } from "./elements.js";
import { clock, count, rate, seconds } from "./format.js";

const labels = [...document.querySelectorAll("#requests th")].map((th) => th.textContent);
const rows = new Map();

const ends = { stop: "complete", length: "cut at its limit of tokens", tool_calls: "calls a tool" };
const known = (n) => (n === null || n === undefined ? "" : count(n));

function state(r) {
  if (r.live) return r.prompt === undefined ? "waiting" : r.first_token === null ? "prompt" : "answering";
  if (r.status === 499) return "client left";
  if (r.error || r.status >= 400) return `${r.status} ${r.error}`.trim();
  return r.finish ? r.finish.split(",").map((why) => ends[why] ?? why).join(", ") : String(r.status);
}

function why(r) {
  const apart = [r.reason, r.diverged && `differs at ${r.diverged}`, r.conversation && `conversation ${r.conversation}`];
  return apart.filter(Boolean).join("; ");
}

const cells = (r) => [
  clock(r.began), state(r), known(r.prompt), known(r.matched), known(r.cached), known(r.restored), known(r.remote),
  known(r.computed), known(r.generated), r.first_token === null ? "" : seconds(r.first_token),
  r.speed === null ? "" : rate(r.speed), why(r), r.path,
];

export function showRequests({ requests }) {
  const body = byId("rows");
  const order = Object.entries(requests).sort(([idA, a], [idB, b]) => b.live - a.live || b.began - a.began || (idA < idB ? -1 : 1));
  byId("no-requests").hidden = order.length > 0;
  for (const [id, row] of rows) if (!(id in requests)) { row.remove(); rows.delete(id); }
  order.forEach(([id, request], i) => {
    let row = rows.get(id);
    if (!row) {
      row = make("tr", {}, ...labels.map((label) => make("td", { "data-label": label })));
      row.title = id;
      rows.set(id, row);
    }
    row.classList.toggle("live", request.live);
    cells(request).forEach((text, j) => say(row.children[j], text));
    if (body.children[i] !== row) body.insertBefore(row, body.children[i] ?? null);
  });
}
