// Starts the page: the key, the views, and the stream that feeds them.

import { byId, say } from "./elements.js";
import { follow, setKey } from "./feed.js";
import { seconds } from "./format.js";
import { showNow } from "./now.js";
import { showRequests } from "./requests.js";
import { showStorage } from "./storage.js";
import { showTree } from "./tree.js";

const views = { now: showNow, tree: showTree, requests: showRequests, storage: showStorage };
let picture = null;
let locked = false;

const chosen = () => (location.hash.slice(1) in views ? location.hash.slice(1) : "now");

function show() {
  const view = chosen();
  byId("login").hidden = !locked;
  for (const name of Object.keys(views)) byId(name).hidden = locked || !picture || name !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (locked || !picture) return;
  const { server, now } = picture;
  say(byId("server"), `${server.model}, KV in ${server.kv}, version ${server.version}, up for ${seconds(now.time - server.since)}`);
  document.title = `${view[0].toUpperCase()}${view.slice(1)} – Onefold`;
  views[view](picture);
}

function linked(state, message) {
  locked = state === "key";
  say(byId("login-error"), locked ? message : "");
  byId("link").classList.toggle("bad", state === "waiting");
  say(byId("link"), state === "waiting" ? `${message} Trying again; the figures are the last that came.` : "");
  if (locked) {
    show();
    byId("key").focus();
  }
}

const start = () => follow((drawn) => { picture = drawn; show(); }, linked);

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  byId("key").value = "";
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
