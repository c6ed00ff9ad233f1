// What the scripts of JavaScript clients share: as client_cases.py for those in Python.
export const MODEL = process.env.PENSTOCK_CLIENT_MODEL;
export const URL = process.env.OPENAI_BASE_URL;
export const KEY = process.env.OPENAI_API_KEY;
export const MESSAGES = [{ role: "user", content: "How is the weather in Rio?" }];
// Biases of the end id, of a quotation mark and of a brace: an answer ends as soon as its grammar allows.
const TO_THE_END = { 2: 40, 9: 20, 100: 30 };

// Adds the biases to each request, as no client of others has a field for them in all of its ways.
export async function fetchToTheEnd(url, init) {
  const body = { ...JSON.parse(init.body), logit_bias: TO_THE_END };
  return fetch(url, { ...init, body: JSON.stringify(body) });
}

export function check(isRight, what) {
  if (!isRight) throw new Error(`wrong: ${typeof what === "string" ? what : JSON.stringify(what)}`);
}

// Runs the cases, and exits with 1 if any fails.
export async function run(cases) {
  let failed = 0;
  for (const [name, runCase] of Object.entries(cases)) {
    try {
      await runCase();
      console.log(`ok ${name}`);
    } catch (error) {
      failed += 1;
      console.log(`FAILED ${name}: ${error.stack} ${JSON.stringify(error.cause ?? error.value ?? "")}`.slice(0, 3000));
    }
  }
  process.exit(failed ? 1 : 0);
}
