// https://github.com/anthropics/anthropic-sdk-typescript: a client finds ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY.

import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import { MODEL, QUESTION, assert, tried } from "./report.mjs";

const client = new Anthropic();
const messages = [{ role: "user", content: QUESTION }];
const input_schema = { type: "object", properties: { city: { type: "string", maxLength: 12 } }, required: ["city"] };
const weather = { name: "get_weather", description: "the weather of a city", input_schema };

async function plain() {
  const answer = await client.messages.create({ model: MODEL, max_tokens: 12, messages });
  assert(answer.id.startsWith("msg_") && answer.content[0].text && answer._request_id, answer);
  assert((await client.messages.countTokens({ model: MODEL, messages })).input_tokens > 0, "no tokens");
  const error = await client.messages.create({ model: "nosuch", max_tokens: 1, messages }).catch((raised) => raised);
  assert(error instanceof Anthropic.NotFoundError && error.type === "not_found_error", error);
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert(names.includes(MODEL), names);
}

async function stream() {
  const events = client.messages.stream({ model: MODEL, max_tokens: 8, messages });
  let text = "";
  events.on("text", (delta) => (text += delta));
  const final = await events.finalMessage();
  assert(text && text === final.content[0].text && final.usage.output_tokens > 0, final);
}

async function tools() {
  const asked = { model: MODEL, max_tokens: 64, messages, tools: [weather], tool_choice: { type: "any" } };
  const answer = await client.messages.create(asked);
  const call = answer.content.find((part) => part.type === "tool_use");
  assert(call.input.city && answer.stop_reason === "tool_use", answer);
  const final = await client.messages.stream(asked).finalMessage();
  assert(final.content.at(-1).input.city, final);
  const result = { type: "tool_result", tool_use_id: call.id, content: "sunny" };
  const back = [...messages, { role: "assistant", content: answer.content }, { role: "user", content: [result] }];
  assert((await client.messages.create({ ...asked, messages: back, tool_choice: { type: "auto" } })).content, back);
}

async function schema() {
  const format = zodOutputFormat(z.object({ city: z.string().max(12) }));
  const parsed = await client.messages.parse({ model: MODEL, max_tokens: 40, messages, output_config: { format } });
  assert(parsed.parsed_output.city, parsed);
}

await tried({ plain, stream, tools, schema });
