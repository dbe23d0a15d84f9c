// report.py for clients in JavaScript: what a script tells the runner, a line of JSON for each thing it tried.

export const MODEL = process.env.MODEL;
export const EMBEDDING_MODEL = process.env.EMBEDDING_MODEL;
export const BASE_URL = process.env.OPENAI_BASE_URL;
export const KEY = process.env.OPENAI_API_KEY;
export const QUESTION = "What is the capital of France? Answer in one sentence.";

/** Run each check, named like a column of the table; one that throws has failed. */
export async function tried(checks) {
  for (const [check, run] of Object.entries(checks)) {
    let failed = "";
    try {
      await run();
    } catch (error) {
      console.error(error);
      failed = `${error.name}: ${error.message}`.slice(0, 600);
    }
    console.log(`\n@@${JSON.stringify({ check, failed })}`);
  }
}

export function assert(holds, told) {
  if (!holds) throw new Error(`not so: ${JSON.stringify(told)}`);
}
