// https://github.com/openai/openai-node: a client finds OPENAI_BASE_URL and OPENAI_API_KEY by itself.

import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { EMBEDDING_MODEL, MODEL, QUESTION, assert, tried } from "./report.mjs";

const client = new OpenAI();
const messages = [{ role: "user", content: QUESTION }];
const City = z.object({ city: z.string().max(12) });
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 } },
  required: ["city"],
  additionalProperties: false,
};
const weather = { type: "function", function: { name: "get_weather", parameters } };

async function plain() {
  const answer = await client.chat.completions.create({ model: MODEL, messages, max_tokens: 12 });
  assert(answer.choices[0].message.content && answer.usage.completion_tokens > 0 && answer._request_id, answer);
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert(names.includes(MODEL), names);
  const error = await client.chat.completions.create({ model: "nosuch", messages }).catch((raised) => raised);
  assert(error instanceof OpenAI.NotFoundError && error.code === "model_not_found", error);
  const file = path.join(fs.mkdtempSync(path.join(os.tmpdir(), "openai-node-")), "train.jsonl");
  fs.writeFileSync(file, JSON.stringify({ messages: [...messages, { role: "assistant", content: "Paris." }] }) + "\n");
  const made = await client.files.create({ file: fs.createReadStream(file), purpose: "fine-tune" });
  assert((await (await client.files.content(made.id)).text()).includes("Paris."), made);
  assert((await client.files.delete(made.id)).deleted, made);
}

async function stream() {
  const events = client.chat.completions.stream({ model: MODEL, messages, max_tokens: 8 });
  let text = "";
  events.on("content", (delta) => (text += delta));
  const final = await events.finalChatCompletion();
  assert(text && text === final.choices[0].message.content, final);
  const chunks = await client.chat.completions.create({
    model: MODEL, messages, max_tokens: 8, stream: true, stream_options: { include_usage: true },
  });
  let usage;
  for await (const chunk of chunks) usage = chunk.usage ?? usage;
  assert(usage.completion_tokens > 0, usage);
}

async function tools() {
  const asked = [];
  const named = { type: "function", function: { name: "get_weather" } };
  const runner = client.chat.completions.runTools({
    model: MODEL,
    messages,
    max_tokens: 64,
    tool_choice: named,
    tools: [{
      type: "function",
      function: { ...weather.function, function: ({ city }) => (asked.push(city), "sunny"), parse: JSON.parse },
    }],
  });
  await runner.done();
  assert(asked[0], runner.messages);
  const events = client.chat.completions.stream({
    model: MODEL, messages, max_tokens: 64, tools: [weather], tool_choice: "required",
  });
  const call = (await events.finalChatCompletion()).choices[0].message.tool_calls[0];
  assert(JSON.parse(call.function.arguments).city, call);
}

async function schema() {
  const response_format = zodResponseFormat(City, "city");
  const parsed = await client.chat.completions.parse({ model: MODEL, messages, max_tokens: 40, response_format });
  assert(parsed.choices[0].message.parsed.city, parsed);
}

async function responses() {
  const answer = await client.responses.create({ model: MODEL, input: QUESTION, max_output_tokens: 12 });
  const more = { model: MODEL, input: "And of Italy?", previous_response_id: answer.id, max_output_tokens: 6 };
  assert(answer.output_text && (await client.responses.create(more)).output_text, answer);
  const format = zodTextFormat(City, "city");
  const parsed = await client.responses.parse({ model: MODEL, input: QUESTION, max_output_tokens: 40, text: { format } });
  assert(parsed.output_parsed.city, parsed);
  const tool = { type: "function", name: "get_weather", parameters, strict: true };
  const events = client.responses.stream({
    model: MODEL, input: QUESTION, max_output_tokens: 64, tools: [tool], tool_choice: "required",
  });
  let pieces = "";
  events.on("response.function_call_arguments.delta", (event) => (pieces += event.delta));
  const call = (await events.finalResponse()).output.find((item) => item.type === "function_call");
  assert(call.name === "get_weather" && JSON.parse(call.arguments).city && pieces === call.arguments, [pieces, call]);
  await client.responses.delete(answer.id);
}

async function logprobs() {
  const asked = { model: MODEL, messages, max_tokens: 3, logprobs: true, top_logprobs: 2 };
  const answer = await client.chat.completions.create(asked);
  assert(answer.choices[0].logprobs.content[0].top_logprobs.length === 2, answer);
}

async function embeddings() {
  const found = await client.embeddings.create({ model: EMBEDDING_MODEL, input: ["one", "two"] });
  assert(found.data.length === 2 && found.data[0].embedding.length > 10, found);
}

await tried({ plain, stream, tools, schema, responses, logprobs, embeddings });
