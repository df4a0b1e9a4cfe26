// The icicle: every prefix that is held, as wide as its bytes with all that lies below it.
//
// Elements are kept from one picture to the next, so that the focus and the choice stay where they are. Their order is
// that of the tree, a prefix before what is below it: assistive technology reads it so.

import { byId, define, make, mark, say } from "./elements.js";
import { ask, Refused, Unreachable } from "./feed.js";
import { ago, count, counted, size } from "./format.js";

const ages = [[10, "10 s"], [60, "a minute"], [600, "10 minutes"], [3600, "an hour"], [86400, "a day"], [Infinity, ""]];
const ROW = 1.6;  // rem, as in style.css
const LABEL = 6;  // per cent of the width below which a box has no text
const ARMED = 5000;  // ms for which Forget waits to be pressed again
const boxes = new Map();
let picture = null;
let layout = new Map();  // by name, a box before what is below it: { box, left, width, depth, above, below, beside }
let zoomed = "", picked = "", focused = "", forgotten = "", asked = 0, told = "", forgetting = 0;

const among = (where) => [where.includes("m") && "memory", where.includes("d") && "disk"].filter(Boolean);

function placeOf(box) {
  const places = among(box.where);
  if (box.shared) places.push(box.shared < box.end - box.start ? `the shared store (${counted(box.shared, "token")})` : "the shared store");
  return places.length ? places.join(" and ") : "memory";
}

export function showTree(drawn) {
  picture = drawn;
  legend();
  arrange();
  paint();
  if (picked && !picture.tree[picked]) close(picked === forgotten ? "" : "This prefix is not held any more.");
  else if (picked) facts();
}

/** Forgets every prefix: another server has others, with the same numbers. */
export function resetTree() {
  const lost = byId("icicle").contains(document.activeElement);
  zoomed = focused = forgotten = "";
  if (picked) close("The server has started again: its prefixes are others.");
  for (const element of boxes.values()) element.remove();
  boxes.clear();
  if (lost) byId("tree").focus();
}

function legend() {
  const list = byId("ages");
  if (list.children.length) return;
  ages.forEach((_, i) => list.append(make("li", {}, make("span", { class: `swatch age${i}` }), make("span", { text: idleFor(i) }))));
  list.append(make("li", {}, make("span", { class: "swatch age2 away" }), make("span", { text: "hatched: on disk only" })));
}

const idleFor = (age) => (age < ages.length - 1 ? `less than ${ages[age][1]}` : `more than ${ages[age - 1][1]}`);
const ageOf = (box) => Math.max(0, ages.findIndex(([most]) => picture.now.time - box.used < most));

/** Places every box: its left edge and width in per cent, its row, and who its neighbours are. */
function arrange() {
  const below = new Map();
  for (const [name, box] of Object.entries(picture.tree)) {
    const above = box.above && box.above in picture.tree ? box.above : "";
    if (!below.has(above)) below.set(above, []);
    below.get(above).push(name);
  }
  const of = (name) => picture.tree[name];
  for (const names of below.values()) names.sort((a, b) => of(b).total - of(a).total || (a < b ? -1 : 1));
  if (zoomed && !(zoomed in picture.tree)) zoomed = "";
  const tops = zoomed ? [zoomed] : below.get("") ?? [];
  const hasBytes = tops.some((name) => of(name).total);
  const leaves = (name) => of(name).merged ?? ((below.get(name) ?? []).reduce((sum, next) => sum + leaves(next), 0) || 1);
  const weight = (name) => (hasBytes ? of(name).total : leaves(name));
  const whole = tops.reduce((sum, name) => sum + weight(name), 0);
  layout = new Map();
  const place = (names, from, depth, above) => {
    let at = from;
    for (const name of names) {
      const share = weight(name) / whole, next = below.get(name) ?? [];
      layout.set(name, { box: of(name), left: 100 * at, width: 100 * share, depth, above, below: next, beside: names });
      place(next, at, depth + 1, name);
      at += share;
    }
  };
  place(tops, 0, 0, "");
}

function paint() {
  const root = byId("icicle"), active = document.activeElement, had = root.contains(active) ? focused : "";
  byId("empty").hidden = layout.size > 0;
  root.hidden = layout.size === 0;
  byId("zoom").hidden = !zoomed;
  if (!layout.has(focused)) focused = neighbour();
  for (const [name, element] of boxes) {
    if (layout.has(name)) continue;
    element.remove();
    boxes.delete(name);
  }
  let depth = 0, i = 0;
  for (const [name, place] of layout) {
    depth = Math.max(depth, place.depth);
    const element = boxes.get(name) ?? add(name);
    if (root.children[i] !== element) root.insertBefore(element, root.children[i] ?? null);
    i += 1;
    const { box } = place;
    const kinds = [["away", box.where === "d"], ["several", box.merged], ["slim", place.width < 1]];
    mark(element, "class", ["box", `age${ageOf(box)}`, ...kinds.filter(([, is]) => is).map(([kind]) => kind)].join(" "));
    element.style.left = `${place.left}%`;
    element.style.width = `${place.width}%`;
    element.style.top = `${place.depth * ROW}rem`;
    mark(element, "tabindex", name === focused ? 0 : -1);
    mark(element, "aria-level", place.depth + 1);
    mark(element, "aria-posinset", place.beside.indexOf(name) + 1);
    mark(element, "aria-setsize", place.beside.length);
    mark(element, "aria-selected", name === picked);
    mark(element, "aria-expanded", place.below.length ? "true" : null);
    const said = describe(box);
    mark(element, "aria-label", said);
    mark(element, "title", said);
    say(element, place.width >= LABEL ? label(box) : "");
  }
  root.style.height = `${(depth + 1) * ROW + 0.2}rem`;
  if (had && document.activeElement !== boxes.get(focused)) refocus();
}

/** Returns the box that comes next after the one that had the focus and is not drawn any more. */
function neighbour() {
  const names = [...boxes.keys()].sort((a, b) => (boxes.get(a).compareDocumentPosition(boxes.get(b)) & 4 ? -1 : 1));
  const at = names.indexOf(focused);
  const around = at < 0 ? [] : [...names.slice(at + 1), ...names.slice(0, at).reverse()];
  return around.find((name) => layout.has(name)) ?? layout.keys().next().value ?? "";
}

/** Puts the focus on the box that has the turn, or on the view if there is none. */
function refocus() {
  (boxes.get(focused) ?? byId("tree")).focus({ preventScroll: true });
}

function tokens(box) {
  if (!box.merged) return counted(box.end - box.start, "token");
  return `${count(box.merged)} ${box.crowded ? "" : "small "}prefix${box.merged === 1 ? "" : "es"}`;
}

function label(box) {
  const marks = `${box.readers ? ` · ${counted(box.readers, "reader")}` : ""}${box.pins ? " · pinned" : ""}`;
  return `${tokens(box)} · ${size(box.total)}${marks}`;
}

/** Returns the name of a box. It changes with what is held, not with every second that passes. */
function describe(box) {
  const range = box.merged ? "" : `, ${count(box.start)} to ${count(box.end)}`;
  const readers = box.readers ? `, ${counted(box.readers, "reader")}` : "";
  return `${tokens(box)}${range}, ${size(box.total)} with all below, in ${placeOf(box)}, used ${idleFor(ageOf(box))} ago${readers}${box.pins ? ", pinned" : ""}`;
}

function add(name) {
  const element = make("div", { role: "treeitem" });
  element.addEventListener("click", () => { focus(name); open(name); });
  element.addEventListener("dblclick", () => zoom(name));
  element.addEventListener("keydown", (event) => key(event, name));
  boxes.set(name, element);
  return element;
}

function focus(name) {
  if (!layout.has(name)) return;
  focused = name;
  for (const [other, element] of boxes) mark(element, "tabindex", other === name ? 0 : -1);
  boxes.get(name).focus();
}

function key(event, name) {
  const { above, below, beside } = layout.get(name);
  const at = beside.indexOf(name);
  const to = {
    ArrowUp: above, ArrowDown: below[0], ArrowLeft: beside[at - 1], ArrowRight: beside[at + 1],
    Home: layout.keys().next().value, End: [...layout.keys()].pop(),
  };
  if (Object.hasOwn(to, event.key)) focus(to[event.key] || name);
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
  refocus();
}

// -- one prefix ---------------------------------------------------------------------------------

const tell = (said) => say(byId("said"), said);

function close(said) {
  const lost = byId("node").contains(document.activeElement);
  picked = told = "";
  disarm();
  byId("node").hidden = true;
  if (said) tell(said);
  if (lost) refocus();
}

function open(name) {
  picked = name;
  told = "";
  disarm();
  tell("");
  byId("node").hidden = false;
  say(byId("text"), "");
  byId("node-text").hidden = true;
  byId("node-requests").replaceChildren();
  paint();
  facts();
}

/** Shows what the picture has of the prefix that is open, and asks for the rest if that has changed. */
function facts() {
  const box = picture.tree[picked];
  const why = box.crowded ? "too many to draw" : "each under a thousandth of the width";
  say(byId("node-title"), box.merged ? `${tokens(box)}, ${why}` : `Tokens ${count(box.start)} to ${count(box.end)}`);
  const space = picture.spaces[box.space];
  define(byId("node-facts"), [
    ["Its own bytes", box.merged ? "" : size(box.bytes)],
    ["With all below", size(box.total)],
    ["Last used", ago(box.used, picture.now.time)],
    ["Readers now", count(box.readers)],
    ["Lies in", placeOf(box)],
    ["Place in the order of eviction", turnOf(box)],
    ["Pins", count(box.pins)],
    ["Namespace", space ? space : "shared by all requests"],
  ].filter(([, text]) => text !== ""));
  const not = whyNot(box);
  say(byId("node-why"), not);
  byId("pin").disabled = Boolean(not) || (!box.where.includes("m") && byId("pin").textContent === "Pin");
  byId("forget").disabled = Boolean(not);
  if (!not && !box.where.includes("m")) say(byId("node-why"), "Only what is in memory can be pinned.");
  const changed = JSON.stringify([picked, box.start, box.end, box.where, box.pins, box.readers, box.used, box.shared]);
  if (told !== changed) {
    told = changed;
    more();
  }
}

function turnOf(box) {
  if (box.turn) return count(box.turn);
  if (box.readers) return "not now: a request reads it";
  if (box.pins) return "not now: it is pinned";
  return box.where.includes("m") ? "not now" : "not at all: it is not in memory";
}

function whyNot(box) {
  if (!picture.server.may_change) return "Nobody can pin or forget here: this server listens on other addresses than the loopback, and needs no key.";
  return box.merged ? "Several prefixes are merged here. Open the one above wide to see them, and pin or forget one." : "";
}

async function more() {
  const name = picked, number = ++asked;
  if (picture.tree[name].merged) return;
  const answer = await answered(() => ask(`/nodes/${name}`));
  if (!answer || number !== asked || picked !== name) return;
  say(byId("pin"), answer.pinned_here ? "Unpin" : "Pin");
  const list = byId("node-requests");
  const rows = answer.requests.map(({ id, did }) => {
    const row = picture.requests[id];
    return `${did}: ${id.slice(0, 8)} ${row ? `${row.path}, ${ago(row.began, picture.now.time)}` : ""}`;
  });
  list.replaceChildren(...(rows.length ? rows : ["None of the last 200."]).map((text) => make("li", { text })));
  byId("node-text").hidden = answer.text === undefined;
  if (answer.text !== undefined) say(byId("text"), answer.text_end ? `${answer.text}\n[…]\n${answer.text_end}` : answer.text);
}

/** Returns the answer, or shows why there is none. */
async function answered(send) {
  try {
    return await send();
  } catch (error) {
    if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
    tell(error.message);
    return null;
  }
}

byId("pin").addEventListener("click", async () => {
  const name = picked, action = byId("pin").textContent === "Pin" ? "pin" : "unpin";
  const answer = await answered(() => ask(`/nodes/${name}/${action}`, "POST"));
  if (!answer) return;
  tell(answer.pinned_here ? "Pinned: it stays in memory." : "Unpinned.");
  if (picked === name) say(byId("pin"), answer.pinned_here ? "Unpin" : "Pin");
});

/** Makes Forget ask again. */
function disarm() {
  clearTimeout(forgetting);
  forgetting = 0;
  say(byId("forget"), "Forget");
}

byId("forget").addEventListener("blur", disarm);
byId("forget").addEventListener("click", async () => {
  if (!forgetting) {
    forgetting = setTimeout(disarm, ARMED);
    say(byId("forget"), "Forget it and all below: press again");
    return;
  }
  disarm();
  forgotten = picked;
  const answer = await answered(() => ask(`/nodes/${forgotten}/forget`, "POST"));
  if (answer) tell(`${counted(answer.forgotten_tokens, "token")} forgotten.`);
});

byId("zoom-out").addEventListener("click", () => zoom(""));
