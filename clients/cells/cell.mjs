// What all JavaScript cells share: what is asked and must come back, and results as lines of JSON.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { z } from "zod";

export const SAID = JSON.parse(readFileSync(new URL("said.json", import.meta.url), "utf8"));
export const URL_ = process.env.ONEFOLD_URL ?? "http://127.0.0.1:8080";
export const TOKENS = 200;
export const MESSAGES = [{ role: "system", content: SAID.system }, { role: "user", content: SAID.greet }];
export const QUESTION = [{ role: "system", content: SAID.system }, { role: "user", content: SAID.weather }];

const city = z.enum(["Oslo", "Paris", "Lima"]);
const days = z.number().int().min(1).max(7);
export const Arguments = z.strictObject({ city, days });
export const Forecast = z.strictObject({ city, days, sunny: z.boolean() });

export function streamed(pieces, whole) {
  const said = pieces.filter((piece) => piece);
  assert.equal(said.join(""), whole);
  assert.ok(said.length > 1, "the answer came in one piece");
}

/** A call that the model would not have made: its arguments keep to the schema. */
export function forced(name, given) {
  assert.equal(name, SAID.call.name);
  Arguments.parse(typeof given === "string" ? JSON.parse(given) : given);
}

/** Of a request that was asked before. The greeting is three tokens and the end. */
export function counted(prompt, completion, cached) {
  assert.ok(prompt > 20, `${prompt} prompt tokens`);
  assert.ok(completion >= 3 && completion < 8, `${completion} completion tokens`);
  assert.ok(cached > 20, `${cached} cached tokens on a repeat`);
}

export async function main(cells) {
  for (const [cell, run] of Object.entries(cells)) {
    const [done] = await Promise.allSettled([run()]);
    const error = done.reason;
    const problem = done.status === "fulfilled" ? "" : `${error?.name}: ${error?.message}`.replaceAll(/\s+/g, " ");
    console.log(JSON.stringify({ cell, problem }));
  }
}
