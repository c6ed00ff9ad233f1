// OpenAI's client in JavaScript: chats, streams, runTools, parsed answers, responses.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { MESSAGES, MODEL, check, fetchToTheEnd, run } from "./client_cases.mjs";

const client = new OpenAI({ maxRetries: 0, fetch: fetchToTheEnd });
const FORECAST = z.object({ city: z.enum(["Rio", "Bern"]), days: z.int().min(1).max(14) });
const CHAT = { model: MODEL, messages: MESSAGES, max_tokens: 300 };
const PARAMETERS = {
  type: "object",
  properties: { city: { enum: ["Rio", "Bern"] }, days: { enum: [1, 2, 3] } },
  required: ["city", "days"],
  additionalProperties: false,
};

function weatherTool(called) {
  const weather = ({ city, days }) => {
    called.push(city);
    return `sunny in ${city} for ${days} days`;
  };
  return {
    type: "function",
    function: { name: "weather", description: "of a city", parameters: PARAMETERS, parse: JSON.parse, function: weather },
  };
}

await run({
  async chat() {
    const answer = await client.chat.completions.create({ ...CHAT, max_tokens: 5 });
    check(answer.usage.completion_tokens > 0, answer);
  },
  async stream() {
    const stream = client.chat.completions.stream({ ...CHAT, stream_options: { include_usage: true } });
    const answer = await stream.finalChatCompletion();
    check(answer.usage.completion_tokens > 0 && answer.choices[0].finish_reason, answer);
  },
  async runTools() {
    const called = [];
    const runner = client.chat.completions.runTools(
      { ...CHAT, tools: [weatherTool(called)], tool_choice: "required", parallel_tool_calls: false },
      { maxChatCompletions: 2 },
    );
    await runner.done();
    check(called.length === 2 && runner.messages.some(({ role }) => role === "tool"), runner.messages);
  },
  async runToolsInAStream() {
    const called = [];
    const runner = client.chat.completions.runTools(
      { ...CHAT, stream: true, tools: [weatherTool(called)], tool_choice: { type: "function", function: { name: "weather" } } },
      { maxChatCompletions: 2 },
    );
    await runner.done();
    check(called.length === 1 && runner.messages.at(-1).role === "tool", runner.messages);
  },
  async parse() {
    const answer = await client.chat.completions.parse({ ...CHAT, response_format: zodResponseFormat(FORECAST, "forecast") });
    check(FORECAST.safeParse(answer.choices[0].message.parsed).success, answer);
  },
  async response() {
    const answer = await client.responses.parse({
      model: MODEL,
      input: MESSAGES,
      max_output_tokens: 300,
      text: { format: zodTextFormat(FORECAST, "forecast") },
    });
    check(FORECAST.safeParse(answer.output_parsed).success, answer);
  },
  async responseStreamWithTools() {
    const { parameters } = weatherTool([]).function;
    const stream = client.responses.stream({
      model: MODEL,
      input: MESSAGES,
      max_output_tokens: 300,
      tools: [{ type: "function", name: "weather", parameters, strict: true }],
      tool_choice: "required",
      parallel_tool_calls: false,
    });
    const answer = await stream.finalResponse();
    check(answer.output[0].type === "function_call" && JSON.parse(answer.output[0].arguments).city, answer);
    const next = await client.responses.create({
      model: MODEL,
      previous_response_id: answer.id,
      input: [{ type: "function_call_output", call_id: answer.output[0].call_id, output: "sunny" }],
      max_output_tokens: 5,
    });
    check(next.previous_response_id === answer.id, next);
  },
});
