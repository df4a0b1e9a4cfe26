// The budget as one bar, figures, and charts of the time since the page was opened.

import uPlot from "./vendor/uPlot.js";
import { byId, define, make, say } from "./elements.js";
import { count, counted, rate, seconds, share, size } from "./format.js";

const purposes = [
  ["live", "running requests", "purpose_live"],
  ["stored", "stored", "stored"],
  ["checkpoint", "checkpoints", "purpose_checkpoint"],
  ["room", "room to grow", "room"],
  ["scratch", "scratch of a forward", "purpose_scratch"],
  ["inflight", "copies", "purpose_inflight"],
  ["disk_buffers", "disk buffers", "purpose_disk_buffers"],
  ["padding", "padding", "purpose_padding"],
  ["pool", "kept by MLX for reuse", "purpose_pool"],
];

const lines = [
  ["Tokens/s", "tokens_per_second", "--live"],
  ["Requests waiting", "queued", "--scratch"],
  ["Hit rate, 1 minute, %", "hits_1", "--disk_buffers"],
  ["Memory used, MB", "used", "--stored"],
];
const MOST = 900, LEAST = 60;  // seconds that a chart shows
const times = [];
const values = lines.map(() => []);
const charts = [];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function showNow({ now, server }) {
  byId("uncached").hidden = !server.uncached;
  say(byId("uncached"), server.uncached ? `This model runs uncached: ${server.uncached}` : "");
  bar(now);
  const fits = now.conversation_tokens ? Math.floor(now.evictable_tokens / now.conversation_tokens) : null;
  define(byId("figures"), [
    ["Tokens/s, all answers", rate(now.tokens_per_second)],
    ["Prompt tokens/s computed", rate(now.prefilled_per_second)],
    ["First token, median of the last 50", seconds(now.first_token)],
    ["Hit rate, 1 minute", share(now.hits_1)],
    ["Hit rate, 5 minutes", share(now.hits_5)],
    ["Hit rate, 15 minutes", share(now.hits_15)],
    ["Waiting", count(now.queued)],
    ["Prompts being computed", count(now.prefilling)],
    ["Answers being written", count(now.decoding)],
    ["Preempted so far", count(now.preemptions)],
    ["Refused so far", count(now.refused)],
    ["Failed so far", count(now.failed)],
    ["Pinned", size(now.pinned)],
    ["Tokens stored", count(now.stored_tokens)],
    ["Tokens that fit, nothing evicted", count(now.free_tokens)],
    ["Tokens that fit, idle ones evicted", count(now.evictable_tokens)],
    ["Conversations like the last 50 that fit", fits === null ? "none yet" : count(fits)],
    ["Tokens evicted so far", count(now.evicted_tokens)],
    ["Prefixes held", count(now.nodes)],
  ]);
  draw(now);
}

/** One bar: the weights, a line, and the budget by purpose up to the hard limit. */
function bar(now) {
  const held = { ...now, stored: Math.max(0, now.purpose_stored - now.room) };
  const whole = now.weights + now.budget;
  const parts = [["weights", "weights, beside the budget", now.weights], ...purposes.map(([name, told, field]) => [name, told, held[field]])];
  const box = byId("budget"), legend = byId("legend");
  parts.forEach(([name, told, bytes], i) => {
    if (!box.children[i]) {
      box.append(make("div", { class: name }));
      if (name !== "weights") box.children[i].style.background = `var(--${name})`;
      const swatch = make("span", { class: `swatch ${name}` });
      if (name !== "weights") swatch.style.background = `var(--${name})`;
      legend.append(make("li", {}, swatch, make("span")));
    }
    box.children[i].style.width = `${(100 * bytes) / whole}%`;
    say(legend.children[i].lastElementChild, `${told} ${size(bytes)}`);
    legend.children[i].hidden = !bytes;
  });
  if (!box.querySelector(".limit")) box.append(make("div", { class: "limit", title: "the hard limit" }));
  box.querySelector(".limit").style.right = "0";
  say(byId("budget-text"), `${size(now.used)} of ${size(now.budget)} used, ${size(Math.max(0, now.budget - now.used))} free; most so far ${size(now.peak)}. The red line is the hard limit. Weights take ${size(now.weights)} beside it.`);
}

function draw(now) {
  const last = times[times.length - 1];
  if (now.time === last) return;
  if (now.time < last) [times, ...values].forEach((list) => { list.length = 0; });  // the server's clock was set back
  times.push(now.time);
  lines.forEach(([, field], i) => {
    const value = now[field];
    values[i].push(value === null || value === undefined ? null : field === "used" ? value / 1e6 : field.startsWith("hits") ? 100 * value : value);
  });
  if (times.length > MOST) { times.shift(); values.forEach((v) => v.shift()); }
  if (!charts.length) lines.forEach(chart);
  charts.forEach((plot, i) => plot.setData([times, values[i]]));
  lines.forEach(([name], i) => {
    const last = values[i][values[i].length - 1];
    charts[i].root.setAttribute("aria-label", `${name}: ${last === null ? "no request" : count(last)} now, over ${counted(times.length, "second")}`);
  });
}

function chart([title, , name], i) {
  const holder = byId("charts").appendChild(make("div"));
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  const width = () => Math.max(200, holder.clientWidth);
  const plot = new uPlot({
    title, width: width(), height: 150, legend: { show: false }, cursor: { show: false },
    scales: { x: { range: (u, low, high) => [Math.min(low ?? 0, (high ?? 0) - LEAST), high ?? 0] }, y: { range: (u, low, high) => [0, Math.max(1, high ?? 1) * 1.1] } },
    axes: [axis, { ...axis, size: 55 }],
    series: [{}, { stroke: colour(name), width: 2, spanGaps: false }],
  }, [times, values[i]], holder);
  plot.root.setAttribute("role", "img");
  new ResizeObserver(() => plot.setSize({ width: width(), height: 150 })).observe(holder);
  charts[i] = plot;
}

// Charts are drawn on a canvas, with colours of their own: they are made again if the system's theme changes.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  charts.splice(0).forEach((plot) => plot.destroy());
  byId("charts").replaceChildren();
});
