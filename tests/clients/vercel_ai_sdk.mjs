// https://ai-sdk.dev/providers/openai-compatible-providers: a provider of chat; the Responses API by @ai-sdk/openai.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";
import { z } from "zod";
import { BASE_URL, EMBEDDING_MODEL, KEY, MODEL, QUESTION, assert, tried } from "./report.mjs";

const { Output, embedMany, generateText, streamText, tool } = ai;
const isStepCount = ai.isStepCount ?? ai.stepCountIs; // version 6, which npm takes where Node is older than 22
const settings = { baseURL: BASE_URL, apiKey: KEY };
const box = createOpenAICompatible({ name: "box", includeUsage: true, supportsStructuredOutputs: true, ...settings });
const model = box(MODEL);
const City = z.object({ city: z.string().max(12) });
const tools = {
  get_weather: tool({ description: "the weather of a city", inputSchema: City, execute: () => "sunny" }),
};

async function plain() {
  const answer = await generateText({ model, prompt: QUESTION, maxOutputTokens: 12 });
  assert(answer.text && answer.usage.outputTokens > 0, answer);
}

async function stream() {
  const answer = streamText({ model, prompt: QUESTION, maxOutputTokens: 8 });
  let text = "";
  for await (const piece of answer.textStream) text += piece;
  assert(text && (await answer.usage).outputTokens > 0, text);
}

async function called() {
  for (const toolChoice of ["required", { type: "tool", toolName: "get_weather" }]) {
    const answer = await generateText({ model, prompt: QUESTION, tools, toolChoice, maxOutputTokens: 64 });
    assert(answer.toolCalls[0].input.city && answer.toolResults[0].output === "sunny", answer.content);
  }
  const events = streamText({ model, prompt: QUESTION, tools, toolChoice: "required", maxOutputTokens: 64 });
  assert((await events.toolCalls)[0].input.city, await events.content);
  const steps = { prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }) };
  const told = await generateText({
    model, prompt: QUESTION, tools, maxOutputTokens: 64, stopWhen: isStepCount(2), ...steps,
  });
  assert(told.steps.length === 2 && told.text, told.steps);
}

async function schema() {
  const output = Output.object({ schema: City });
  const answer = await generateText({ model, prompt: QUESTION, output, maxOutputTokens: 40 });
  assert(answer.output.city, answer.text);
  const events = streamText({ model, prompt: QUESTION, output, maxOutputTokens: 40 });
  assert((await events.output).city, await events.text);
}

async function responses() {
  const model = createOpenAI(settings).responses(MODEL);
  const answer = await generateText({ model, prompt: QUESTION, maxOutputTokens: 16 });
  assert(answer.text, answer);
  const events = streamText({ model, prompt: QUESTION, tools, toolChoice: "required", maxOutputTokens: 64 });
  assert((await events.toolCalls)[0].input.city, await events.content);
  const output = Output.object({ schema: City });
  assert((await generateText({ model, prompt: QUESTION, output, maxOutputTokens: 40 })).output.city, "no city");
}

async function embeddings() {
  const found = await embedMany({ model: box.embeddingModel(EMBEDDING_MODEL), values: ["one", "two"] });
  assert(found.embeddings.length === 2 && found.embeddings[0].length > 10, found);
}

await tried({ plain, stream, tools: called, schema, responses, embeddings });
