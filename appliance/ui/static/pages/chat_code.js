// The code that asks what a chat asks: for the OpenAI SDKs and curl. Pure. The key is left to the environment.

/** kind: "python", "javascript" or "curl"; body: of the request. */
export function codeFor(kind, origin, body) {
  if (kind === "python") return python(origin, body);
  return kind === "curl" ? curl(origin, body) : javascript(origin, body);
}

function python(origin, body) {
  const given = Object.entries(body).map(([name, value]) => `    ${name}=${pythonValue(value, 1)},`);
  return `import os
from openai import OpenAI

client = OpenAI(base_url="${origin}/v1", api_key=os.environ["APPLIANCE_KEY"])
stream = client.chat.completions.create(
${given.join("\n")}
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
`;
}

function pythonValue(value, depth) {
  const pad = "    ".repeat(depth);
  if (Array.isArray(value)) return value.length ? `[\n${value.map((one) => `${pad}    ${pythonValue(one, depth + 1)},`).join("\n")}\n${pad}]` : "[]";
  if (value && typeof value === "object") return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${pythonValue(one, depth + 1)}`).join(", ")}}`;
  if (value === null) return "None";
  return typeof value === "boolean" ? (value ? "True" : "False") : JSON.stringify(value);
}

function javascript(origin, body) {
  const given = JSON.stringify({ ...body, stream: true }, null, 2);
  return `import OpenAI from "openai";

const client = new OpenAI({ baseURL: "${origin}/v1", apiKey: process.env.APPLIANCE_KEY });
const stream = await client.chat.completions.create(${given});
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
`;
}

function curl(origin, body) {
  // Within single quotes a shell knows one special character.
  const given = JSON.stringify({ ...body, stream: true }, null, 2).replaceAll("'", "'\\''");
  return `curl -N ${origin}/v1/chat/completions \\
  -H "Authorization: Bearer $APPLIANCE_KEY" \\
  -H "Content-Type: application/json" \\
  -d '${given}'
`;
}
