// Vercel's AI SDK, by its providers for OpenAI's chats and responses, for compatible servers, and for Anthropic's messages.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { KEY, MODEL, URL, check, fetchToTheEnd, run } from "./client_cases.mjs";

const options = { baseURL: URL, apiKey: KEY, fetch: fetchToTheEnd };
const openai = createOpenAI(options);
const compatible = createOpenAICompatible({ name: "penstock", ...options, supportsStructuredOutputs: true, includeUsage: true });
const MODELS = {
  responses: openai(MODEL),
  chat: openai.chat(MODEL),
  compatible: compatible(MODEL),
  messages: createAnthropic(options)(MODEL),
};
const FORECAST = z.object({ city: z.enum(["Rio", "Bern"]), days: z.int().min(1).max(14) });
const WEATHER = z.object({ city: z.enum(["Rio", "Bern"]), days: z.union([z.literal(1), z.literal(2), z.literal(3)]) });
const call = { prompt: "How is the weather in Rio?", maxOutputTokens: 300, maxRetries: 0 };
const weather = () => tool({ description: "of a city", inputSchema: WEATHER, execute: async ({ city }) => `sunny in ${city}` });

const cases = {};
for (const [name, model] of Object.entries(MODELS)) {
  cases[`${name}: generateText`] = async () => {
    const { usage } = await generateText({ ...call, model });
    check(usage.outputTokens > 0, usage);
  };
  cases[`${name}: streamText`] = async () => {
    const result = streamText({ ...call, model, onError: ({ error }) => { throw error; } });
    await result.consumeStream();
    check((await result.usage).outputTokens > 0, await result.usage);
  };
  cases[`${name}: generateObject`] = async () => {
    const { object } = await generateObject({ ...call, model, schema: FORECAST });
    check(FORECAST.safeParse(object).success, object);
  };
  cases[`${name}: streamObject`] = async () => {
    const result = streamObject({ ...call, model, schema: FORECAST });
    for await (const part of result.partialObjectStream) check(part, part);
    check(FORECAST.safeParse(await result.object).success, await result.object);
  };
  cases[`${name}: tools`] = async () => {
    const { steps } = await generateText({
      ...call,
      model,
      tools: { weather: weather() },
      toolChoice: "required",
      stopWhen: stepCountIs(2),
    });
    check(steps.length === 2 && steps.every(({ toolResults }) => toolResults[0].output.startsWith("sunny")), steps);
  };
  cases[`${name}: streamed tools`] = async () => {
    const result = streamText({ ...call, model, tools: { weather: weather() }, toolChoice: { type: "tool", toolName: "weather" } });
    await result.consumeStream();
    check((await result.toolResults)[0].output.startsWith("sunny"), await result.toolCalls);
  };
}
await run(cases);
