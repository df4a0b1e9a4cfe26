// The picture of the server: a whole one when the stream begins, then what changes, once a second.
//
// Uses fetch and not EventSource, which cannot send a key. The key is in this module's memory and nowhere else. A browser
// has six connections for all tabs with one server: a tab that is hidden gives its own back.

const FIRST_WAIT = 500, LONGEST_WAIT = 10000;
const PATIENCE = 20000;  // ms that the server may be silent
let key = "", server = "";

export const setKey = (value) => { key = value; };
/** Names the server that the page shows: another one, or the same one after a restart, refuses to change anything. */
export const setServer = (id) => { server = id; };

/** The server has answered with an error. */
export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

/** There was no answer. */
export class Unreachable extends Error {}

/** Waits for `work`, which `controller` can end. Throws Unreachable if it fails, or takes longer than the patience. */
async function within(controller, work) {
  const late = new Unreachable(`The server has not answered for ${PATIENCE / 1000} s.`);
  const timer = setTimeout(() => controller.abort(late), PATIENCE);
  try {
    return await work;
  } catch (error) {
    throw controller.signal.reason === late ? late : new Unreachable("The server cannot be reached.", { cause: error });
  } finally {
    clearTimeout(timer);
  }
}

async function send(path, method, controller) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (method !== "GET") headers["x-onefold-server"] = server;
  const response = await within(controller, fetch(`v1/page${path}`, { method, headers, signal: controller.signal, cache: "no-store" }));
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try { message = (await response.json()).error.message; } catch { /* not JSON: the status has to do */ }
  throw new Refused(response.status, message);
}

/** Returns the answer as an object. Throws Refused, and Unreachable. */
export async function ask(path, method = "GET") {
  const controller = new AbortController();
  const response = await send(path, method, controller);
  return JSON.parse(await within(controller, response.text()));
}

/** Applies what has changed to a picture. */
export function apply(picture, { set, gone }) {
  for (const [section, names] of Object.entries(gone)) for (const name of names) delete picture[section][name];
  for (const [section, values] of Object.entries(set)) Object.assign(picture[section], values);
  return picture;
}

/** Yields [name, data] of server-sent events as they come. Ends the connection when the caller has enough. */
async function* events(controller) {
  const { body } = await send("/events", "GET", controller);
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let read = "";
  try {
    for (;;) {
      const { value, done } = await within(controller, reader.read());
      if (done) return;
      read += value;
      const parts = read.split("\n\n");
      read = parts.pop();
      for (const part of parts) {
        const found = /^event: (\w+)\ndata: (.*)$/s.exec(part);
        if (found) yield [found[1], JSON.parse(found[2])];
      }
    }
  } finally {
    reader.cancel().catch(() => {});  // it may have failed already
    controller.abort();
  }
}

/** Waits until the tab is visible. */
async function visible() {
  while (document.hidden) await new Promise((done) => document.addEventListener("visibilitychange", done, { once: true }));
}

/** Calls show(picture) with each new picture, and state("live" | "waiting" | "key", message) when the link changes. Goes
 *  on until `signal` says otherwise, or a key is missing or wrong. An error in show is one of the page, not of the link. */
export async function follow(show, state, signal) {
  let wait = FIRST_WAIT;
  for (;;) {
    await visible();
    if (signal.aborted) return;
    const controller = new AbortController();
    const end = () => controller.abort();
    const hide = () => { if (document.hidden) end(); };
    signal.addEventListener("abort", end);
    document.addEventListener("visibilitychange", hide);
    let said = "The server has ended the connection.";
    try {
      let picture = null;
      for await (const [name, data] of events(controller)) {
        if (signal.aborted) return;
        picture = name === "picture" ? data : apply(picture, data);
        wait = FIRST_WAIT;
        try { state("live", ""); show(picture); } catch (error) { reportError(error); }
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused && error.status === 401) return state("key", key ? error.message : "");
      said = error.message;
      if (!(error instanceof Refused || error instanceof Unreachable)) {
        said = "The page does not understand what the server has sent.";
        reportError(error);
      }
    } finally {
      signal.removeEventListener("abort", end);
      document.removeEventListener("visibilitychange", hide);
      end();
    }
    if (signal.aborted) return;
    if (document.hidden) continue;
    state("waiting", said);
    await new Promise((done) => setTimeout(done, wait));
    wait = Math.min(LONGEST_WAIT, 2 * wait);
  }
}
