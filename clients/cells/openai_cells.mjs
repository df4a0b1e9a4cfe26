// OpenAI's own client for JavaScript.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { counted, Forecast, forced, main, MESSAGES, QUESTION, SAID, streamed, TOKENS, URL_ } from "./cell.mjs";

const client = new OpenAI({ baseURL: `${URL_}/v1`, apiKey: "any", maxRetries: 0, timeout: 60_000 });
const same = { model: SAID.model, max_tokens: TOKENS };
const tool = { type: "function", function: { name: SAID.call.name, description: "", parameters: SAID.schema } };
const chat = client.chat.completions;

await main({
  async chat() {
    const done = await chat.create({ messages: MESSAGES, ...same });
    assert.equal(done.choices[0].message.content, SAID.greeting);
  },
  async stream() {
    const pieces = [];
    const stream = chat.stream({ messages: MESSAGES, ...same });
    stream.on("content", (delta) => pieces.push(delta));
    assert.equal(await stream.finalContent(), SAID.greeting);
    streamed(pieces, SAID.greeting);
  },
  async tools() {
    const calls = [];
    const get_weather = async (given) => {
      calls.push(given);
      return SAID.result;
    };
    const runnable = { ...tool, function: { ...tool.function, parse: JSON.parse, function: get_weather } };
    for (const stream of [false, true]) {
      const runner = chat.runTools({ messages: QUESTION, tools: [runnable], stream, ...same });
      assert.equal(await runner.finalContent(), SAID.report);
    }
    assert.deepEqual(calls, [SAID.call.arguments, SAID.call.arguments]);
  },
  async forced() {
    const done = await chat.create({ messages: MESSAGES, tools: [tool], tool_choice: "required", ...same });
    const calls = done.choices[0].message.tool_calls ?? [];
    assert.equal(calls.length, 1, `${calls.length} calls, not one`);
    forced(calls[0].function.name, calls[0].function.arguments);
  },
  async structured() {
    const done = await chat.parse({ messages: MESSAGES, response_format: zodResponseFormat(Forecast, "forecast"), ...same });
    Forecast.parse(done.choices[0].message.parsed);
  },
  async responses() {
    const asked = { model: SAID.model, instructions: SAID.system, max_output_tokens: TOKENS, input: SAID.greet, store: false };
    assert.equal((await client.responses.create(asked)).output_text, SAID.greeting);
    const pieces = [];
    for await (const event of client.responses.stream(asked)) {
      if (event.type === "response.output_text.delta") pieces.push(event.delta);
    }
    streamed(pieces, SAID.greeting);
    const parsed = await client.responses.parse({ ...asked, text: { format: zodTextFormat(Forecast, "forecast") } });
    Forecast.parse(parsed.output_parsed);
  },
  async usage() {
    await chat.create({ messages: MESSAGES, ...same });
    const { usage } = await chat.create({ messages: MESSAGES, ...same });
    counted(usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens);
  },
});
