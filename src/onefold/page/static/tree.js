// The icicle: every prefix that is held, as wide as its bytes with all that lies below it.
//
// Elements are kept from one picture to the next, so that the focus and the choice stay where they are.

import { byId, define, make, say } from "./elements.js";
import { ask, Refused } from "./feed.js";
import { ago, count, counted, seconds, size } from "./format.js";

const ages = [[10, "10 s"], [60, "a minute"], [600, "10 minutes"], [3600, "an hour"], [86400, "a day"], [Infinity, ""]];
const ROW = 1.6;  // rem, as in style.css
const LABEL = 6;  // per cent of the width below which a box has no text
const boxes = new Map();
let picture = null;
let layout = new Map();  // by name: { box, left, width, depth, above, below }
let zoomed = "", picked = "", focused = "", asked = 0, forgetting = "";

const placeOf = (box) => box.where.split("").map((w) => ({ m: "memory", d: "disk" })[w]).join(" and ") || "nowhere";

export function showTree(drawn) {
  picture = drawn;
  legend();
  arrange();
  paint();
  if (picked && !picture.tree[picked]) close("This prefix is not held any more.");
  else if (picked) facts();
}

function legend() {
  const list = byId("ages");
  if (list.children.length) return;
  ages.forEach(([, told], i) => {
    const text = i < ages.length - 1 ? `less than ${told}` : "longer";
    list.append(make("li", {}, make("span", { class: `swatch age${i}` }), make("span", { text })));
  });
  list.append(make("li", {}, make("span", { class: "swatch box away age3" }), make("span", { text: "hatched: on disk only" })));
  list.querySelector(".away").style.position = "static";
}

/** Places every box: its left edge and width in per cent, its row, and who its neighbours are. */
function arrange() {
  const below = new Map();
  for (const [name, box] of Object.entries(picture.tree)) {
    const above = box.above && box.above in picture.tree ? box.above : "";
    if (!below.has(above)) below.set(above, []);
    below.get(above).push(name);
  }
  for (const names of below.values()) names.sort((a, b) => picture.tree[b].total - picture.tree[a].total);
  if (zoomed && !(zoomed in picture.tree)) zoomed = "";
  const tops = zoomed ? [zoomed] : below.get("") ?? [];
  const whole = tops.reduce((sum, name) => sum + picture.tree[name].total, 0);
  layout = new Map();
  const left = [];
  let at = 0;
  for (const name of tops) {
    left.push([name, at, 0, ""]);
    at += picture.tree[name].total / (whole || 1);
  }
  while (left.length) {
    const [name, from, depth, above] = left.shift();
    const box = picture.tree[name];
    layout.set(name, { box, left: 100 * from, width: (100 * box.total) / (whole || 1), depth, above, below: below.get(name) ?? [] });
    let begin = from;
    for (const next of below.get(name) ?? []) {
      left.push([next, begin, depth + 1, name]);
      begin += picture.tree[next].total / (whole || 1);
    }
  }
}

function paint() {
  const root = byId("icicle");
  byId("empty").hidden = layout.size > 0;
  root.hidden = layout.size === 0;
  byId("zoom").hidden = !zoomed;
  for (const [name, element] of boxes) {
    if (layout.has(name)) continue;
    if (element === document.activeElement) root.parentElement.focus();
    element.remove();
    boxes.delete(name);
  }
  if (!layout.has(focused)) focused = layout.keys().next().value ?? "";
  let depth = 0;
  for (const [name, place] of layout) {
    depth = Math.max(depth, place.depth);
    const element = boxes.get(name) ?? add(name);
    const { box } = place;
    const idle = picture.now.time - box.used;
    const age = ages.findIndex(([most]) => idle < most);
    element.className = `box age${age}${box.where === "d" ? " away" : ""}${box.merged ? " several" : ""}${place.width < 1 ? " slim" : ""}`;
    element.style.left = `${place.left}%`;
    element.style.width = `${place.width}%`;
    element.style.top = `${place.depth * ROW}rem`;
    element.tabIndex = name === focused ? 0 : -1;
    element.setAttribute("aria-level", place.depth + 1);
    element.setAttribute("aria-selected", name === picked);
    if (place.below.length) element.setAttribute("aria-expanded", "true");
    else element.removeAttribute("aria-expanded");
    const told = describe(name, box);
    element.setAttribute("aria-label", told);
    element.title = told;
    say(element, place.width >= LABEL ? label(box) : "");
  }
  root.style.height = `${(depth + 1) * ROW + 0.2}rem`;
}

const tokens = (box) => (box.merged ? counted(box.merged, "small prefix").replace("prefixs", "prefixes") : counted(box.end - box.start, "token"));

function label(box) {
  const marks = `${box.readers ? ` · ${counted(box.readers, "reader")}` : ""}${box.pins ? " · pinned" : ""}`;
  return `${tokens(box)} · ${size(box.total)}${marks}`;
}

function describe(name, box) {
  const range = box.merged ? "" : `, ${count(box.start)} to ${count(box.end)}`;
  const readers = box.readers ? `, ${counted(box.readers, "reader")}` : "";
  const turn = box.turn ? `, evicted as number ${count(box.turn)}` : "";
  return `${tokens(box)}${range}, ${size(box.total)} with all below, in ${placeOf(box)}, used ${ago(box.used, picture.now.time)}${readers}${box.pins ? ", pinned" : ""}${turn}`;
}

function add(name) {
  const element = make("div", { role: "treeitem" });
  element.addEventListener("click", () => { focus(name); open(name); });
  element.addEventListener("dblclick", () => zoom(name));
  element.addEventListener("keydown", (event) => key(event, name));
  boxes.set(name, byId("icicle").appendChild(element));
  return element;
}

function focus(name) {
  if (!layout.has(name)) return;
  focused = name;
  for (const [other, element] of boxes) element.tabIndex = other === name ? 0 : -1;
  boxes.get(name).focus();
}

function key(event, name) {
  const place = layout.get(name);
  const beside = place.above ? layout.get(place.above).below : [...layout].filter(([, p]) => !p.depth).map(([n]) => n);
  const at = beside.indexOf(name);
  const to = {
    ArrowUp: place.above, ArrowDown: place.below[0], ArrowLeft: beside[at - 1], ArrowRight: beside[at + 1],
    Home: layout.keys().next().value, End: [...layout.keys()].pop(),
  };
  if (event.key in to) focus(to[event.key] || name);
  else if (event.key === " ") open(name);
  else if (event.key === "Enter") { open(name); zoom(name); }
  else if (event.key === "Escape") zoom("");
  else return;
  event.preventDefault();
}

function zoom(name) {
  zoomed = picture.tree[name]?.merged ? zoomed : name;
  arrange();
  paint();
  if (layout.has(focused)) boxes.get(focused).focus();
}

// -- one prefix ---------------------------------------------------------------------------------

function close(said) {
  picked = "";
  byId("node").hidden = true;
  say(byId("link"), said);
}

async function open(name) {
  picked = name;
  forgetting = "";
  byId("node").hidden = false;
  for (const id of ["node-said", "text"]) say(byId(id), "");
  byId("node-text").hidden = true;
  byId("node-requests").replaceChildren();
  paint();
  facts();
  await more();
}

function facts() {
  const box = picture.tree[picked];
  say(byId("node-title"), box.merged ? `${tokens(box)}, each under a thousandth of the width` : `Tokens ${count(box.start)} to ${count(box.end)}`);
  const space = picture.spaces[box.space];
  define(byId("node-facts"), [
    ["Its own bytes", box.merged ? "" : size(box.bytes)],
    ["With all below", size(box.total)],
    ["Last used", ago(box.used, picture.now.time)],
    ["Readers now", count(box.readers)],
    ["Lies in", placeOf(box)],
    ["Evicted as number", box.turn ? count(box.turn) : "not now: a reader or a pin holds it, or it is not in memory"],
    ["Pins", count(box.pins)],
    ["Namespace", space ? space : "the common one"],
  ].filter(([, text]) => text !== ""));
  const may = picture.server.may_change && !box.merged;
  byId("pin").disabled = byId("forget").disabled = !may;
  byId("pin").title = byId("forget").title = picture.server.may_change ? "" : "This server lets nobody change anything here.";
  if (forgetting !== picked) say(byId("forget"), "Forget");
}

async function more() {
  const name = picked, number = ++asked;
  if (picture.tree[name].merged) return;
  const told = await told_of(() => ask(`/nodes/${name}`));
  if (!told || number !== asked || picked !== name) return;
  say(byId("pin"), told.pinned_here ? "Unpin" : "Pin");
  const list = byId("node-requests");
  list.replaceChildren(...told.requests.map(({ id, did }) => {
    const row = picture.requests[id];
    const when = row ? `${row.path}, ${ago(row.began, picture.now.time)}` : "";
    return make("li", { text: `${did}: ${id.slice(0, 8)} ${when}` });
  }));
  if (!told.requests.length) list.append(make("li", { text: "None of the last 200." }));
  if (told.shared_tokens) list.append(make("li", { text: `${counted(told.shared_tokens, "token")} of it lie in the shared store, too.` }));
  byId("node-text").hidden = told.text === undefined;
  if (told.text !== undefined) say(byId("text"), told.text_end ? `${told.text}\n[…]\n${told.text_end}` : told.text);
}

/** Returns the answer, or shows why there is none. */
async function told_of(send) {
  try {
    return await (await send()).json();
  } catch (error) {
    if (!(error instanceof Refused || error instanceof TypeError)) throw error;
    say(byId("node-said"), error instanceof Refused ? error.message : "The server cannot be reached.");
    return null;
  }
}

byId("pin").addEventListener("click", async () => {
  const name = picked, action = byId("pin").textContent === "Pin" ? "pin" : "unpin";
  const told = await told_of(() => ask(`/nodes/${name}/${action}`, "POST"));
  if (!told) return;
  say(byId("node-said"), told.pinned_here ? "Pinned: it stays in memory." : "Unpinned.");
  say(byId("pin"), told.pinned_here ? "Unpin" : "Pin");
});

byId("forget").addEventListener("click", async () => {
  if (forgetting !== picked) {
    forgetting = picked;
    say(byId("forget"), "Forget it and all below: press again");
    return;
  }
  forgetting = "";
  say(byId("forget"), "Forget");
  const told = await told_of(() => ask(`/nodes/${picked}/forget`, "POST"));
  if (told) say(byId("node-said"), `${counted(told.forgotten_tokens, "token")} forgotten.`);
});

byId("zoom-out").addEventListener("click", () => zoom(""));
