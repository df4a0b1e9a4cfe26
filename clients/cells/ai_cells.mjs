// Vercel's AI SDK: its provider for servers that speak OpenAI's API, and OpenAI's provider for /v1/responses.

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, streamText, tool } from "ai";
import { Arguments, counted, Forecast, forced, main, SAID, streamed, TOKENS, URL_ } from "./cell.mjs";

const address = { baseURL: `${URL_}/v1`, apiKey: "any" };
const compatible = createOpenAICompatible({ name: "onefold", includeUsage: true, supportsStructuredOutputs: true, ...address });
const same = { model: compatible(SAID.model), instructions: SAID.system, maxOutputTokens: TOKENS, maxRetries: 0 };

/** The tool of the script, and the list of its calls. */
function weather() {
  const calls = [];
  const execute = async (given) => {
    calls.push(given);
    return SAID.result;
  };
  return [{ [SAID.call.name]: tool({ description: "", inputSchema: Arguments, execute }) }, calls];
}

async function joined(model) {
  const pieces = [];
  for await (const piece of streamText({ ...same, model, prompt: SAID.greet, onError: () => {} }).textStream) pieces.push(piece);
  streamed(pieces, SAID.greeting);
}

async function called(model) {
  const [tools, calls] = weather();
  const done = await generateText({ ...same, model, tools, stopWhen: isStepCount(3), prompt: SAID.weather });
  assert.equal(done.text, SAID.report);
  assert.deepEqual(calls, [SAID.call.arguments]);
}

await main({
  async chat() {
    assert.equal((await generateText({ ...same, prompt: SAID.greet })).text, SAID.greeting);
  },
  stream: () => joined(same.model),
  tools: () => called(same.model),
  async forced() {
    const [tools] = weather();
    const done = await generateText({ ...same, tools, toolChoice: "required", prompt: SAID.greet });
    assert.equal(done.toolCalls.length, 1, `${done.toolCalls.length} calls, not one`);
    forced(done.toolCalls[0].toolName, done.toolCalls[0].input);
  },
  async structured() {
    const output = Output.object({ schema: Forecast });
    Forecast.parse((await generateText({ ...same, output, prompt: SAID.greet })).output);
  },
  async responses() {
    const model = createOpenAI(address).responses(SAID.model);
    assert.equal((await generateText({ ...same, model, prompt: SAID.greet })).text, SAID.greeting);
    await joined(model);
    await called(model);
  },
  async usage() {
    await generateText({ ...same, prompt: SAID.greet });
    const { usage } = await generateText({ ...same, prompt: SAID.greet });
    counted(usage.inputTokens, usage.outputTokens, usage.inputTokenDetails.cacheReadTokens);
  },
});
