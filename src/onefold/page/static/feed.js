// The picture of the server: a whole one when the stream begins, then what changes, once a second.
//
// Uses fetch and not EventSource, which cannot send a key. The key is in this module's memory and nowhere else.

const FIRST_WAIT = 500, LONGEST_WAIT = 10000;
let key = "";

export const setKey = (value) => { key = value; };

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export async function ask(path, method = "GET", signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch(`v1/page${path}`, { method, headers, signal, cache: "no-store" });
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try { message = (await response.json()).error.message; } catch { /* not JSON: the status has to do */ }
  throw new Refused(response.status, message);
}

/** Applies what has changed to a picture. */
export function apply(picture, { set, gone }) {
  for (const [section, names] of Object.entries(gone)) for (const name of names) delete picture[section][name];
  for (const [section, values] of Object.entries(set)) Object.assign(picture[section], values);
  return picture;
}

/** Yields [name, data] of server-sent events as they come. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let read = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    read += value;
    const parts = read.split("\n\n");
    read = parts.pop();
    for (const part of parts) {
      const found = /^event: (\w+)\ndata: (.*)$/s.exec(part);
      if (found) yield [found[1], JSON.parse(found[2])];
    }
  }
}

/** Calls show(picture) with each new picture, and state("live" | "waiting" | "key", message) when the link changes.
 *  Goes on for ever, but for a key that is missing or wrong: then it returns. */
export async function follow(show, state) {
  let wait = FIRST_WAIT;
  for (;;) {
    let said = "The server has ended the connection.";
    try {
      let picture = null;
      for await (const [name, data] of events((await ask("/events")).body)) {
        picture = name === "picture" ? data : apply(picture, data);
        wait = FIRST_WAIT;
        state("live", "");
        show(picture);
      }
    } catch (error) {
      if (error instanceof Refused && error.status === 401) return state("key", key ? error.message : "");
      if (error instanceof Refused) said = error.message;
      else if (error instanceof TypeError) said = "The server cannot be reached.";
      else throw error;
    }
    state("waiting", said);
    await new Promise((done) => setTimeout(done, wait));
    wait = Math.min(LONGEST_WAIT, 2 * wait);
  }
}
