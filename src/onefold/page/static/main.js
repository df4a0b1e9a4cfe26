// Starts the page: the key, the views, and the stream that feeds them.

import { byId, say } from "./elements.js";
import { follow, setKey, setServer } from "./feed.js";
import { seconds } from "./format.js";
import { showNow } from "./now.js";
import { showRequests } from "./requests.js";
import { showStorage } from "./storage.js";
import { resetTree, showTree } from "./tree.js";

const views = { now: showNow, tree: showTree, requests: showRequests, storage: showStorage };
let picture = null;
let locked = false;
let server = "";
let following = new AbortController();

const chosen = () => (Object.hasOwn(views, location.hash.slice(1)) ? location.hash.slice(1) : "now");

function show() {
  const view = chosen();
  byId("login").hidden = !locked;
  for (const name of Object.keys(views)) byId(name).hidden = locked || !picture || name !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (locked || !picture) return;
  const { server: { model, kv, version, since }, now } = picture;
  const format = kv === "16" ? "KV as the model makes it" : `KV format ${kv}`;
  say(byId("server"), `${model}, ${format}, version ${version}, up for ${seconds(now.time - since)}`);
  document.title = `${view[0].toUpperCase()}${view.slice(1)} – Onefold`;
  views[view](picture);
}

function drawn(next) {
  const another = server && server !== next.server.id;
  picture = next;
  server = next.server.id;
  setServer(server);
  if (another) resetTree();
  show();
}

function linked(state, message) {
  if (locked && state === "live") {
    locked = false;
    show();
    byId("main").focus({ preventScroll: true });
  }
  locked = state === "key" || (locked && state !== "live");
  say(byId("login-error"), state === "key" ? message : "");
  byId("link").classList.toggle("bad", state === "waiting");
  say(byId("link"), state === "waiting" ? `${message} Trying again; the figures are the last that came.` : "");
  if (state === "key") {
    show();
    byId("key").focus();
  }
}

/** Begins to follow the server, with the key that is set now. */
function start() {
  following.abort();
  following = new AbortController();
  follow(drawn, linked, following.signal);
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  if (!key) return;
  byId("key").value = "";
  if (/[^\x20-\x7e]/.test(key)) {
    say(byId("login-error"), "This is no key: a key has only ASCII characters, that is letters without accents, digits and signs.");
    return;
  }
  setKey(key);
  start();
});
window.addEventListener("hashchange", () => {
  show();
  byId("main").focus({ preventScroll: true });
  scrollTo(0, 0);  // the browser has scrolled to the view's element
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();  // the address names the view
  byId("main").focus();
});
show();
start();
