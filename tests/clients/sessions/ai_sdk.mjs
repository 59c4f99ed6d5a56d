// The AI SDK with its provider for servers that are like OpenAI's.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const TURNS = 5;
const QUESTION = "Say something.";
const provider = createOpenAICompatible({
  name: "sluice",
  baseURL: `${url}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const ask = (maxOutputTokens, more = {}) => ({
  model: provider(name),
  prompt: QUESTION,
  maxOutputTokens,
  maxRetries: 0,
  providerOptions: { sluice: { reasoningEffort: "none" } },
  ...more,
});
const person = z.strictObject({
  mood: z.enum(["calm", "wild"]),
  age: z.int().min(0).max(120).nullable(),
});

function check(holds, what) {
  if (!holds) throw new Error(`expected ${what}`);
}

const sessions = {
  async chat() {
    const { text, usage } = await generateText(ask(8, { temperature: 0 }));
    check(text && usage.outputTokens === 8, "a text of eight tokens");
  },
  async stream() {
    const result = streamText(ask(8, { temperature: 0 }));
    let text = "";
    for await (const piece of result.textStream) text += piece;
    check(text && (await result.usage).outputTokens === 8, "a text of eight tokens");
  },
  async tools() {
    const asked = [];
    const weather = tool({
      description: "The weather of a city.",
      inputSchema: z.strictObject({ days: z.int().min(1).max(9) }),
      execute: async ({ days }) => {
        asked.push(days);
        return "sunny";
      },
    });
    const choice = { tools: { weather }, toolChoice: "required", stopWhen: stepCountIs(TURNS) };
    await generateText(ask(400, choice));
    check(asked.length >= TURNS, `${TURNS} calls`);
  },
  async json() {
    const { object } = await generateObject(ask(400, { schema: person }));
    person.parse(object);
  },
  async error() {
    try {
      await generateText(ask(8, { prompt: "word ".repeat(30_000) }));
    } catch (error) {
      check(APICallError.isInstance(error) && error.statusCode === 400, "a refusal");
      check(error.message.includes("maximum context length"), "our own words");
      return;
    }
    throw new Error("a prompt that is too long was taken");
  },
};

const outcomes = {};
for (const [session, run] of Object.entries(sessions)) {
  try {
    await run();
    outcomes[session] = "ok";
  } catch (error) {
    console.error(error);
    outcomes[session] = `${error.name}: ${error.message}`.slice(0, 300);
  }
}
console.log(`OUTCOMES ${JSON.stringify(outcomes)}`);
