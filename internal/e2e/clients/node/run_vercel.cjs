// The Vercel AI SDK.
"use strict";

const assert = require("node:assert/strict");
const { generateText, streamText, generateObject, streamObject, tool, stepCountIs, jsonSchema } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { createOpenAI } = require("@ai-sdk/openai");
const { createAnthropic } = require("@ai-sdk/anthropic");
const check = require("./check.cjs");

check.client("Vercel AI SDK", "ai", 'createOpenAICompatible({ name: "tandem", baseURL: "http://HOST:8000/v1", apiKey: KEY, supportsStructuredOutputs: true })("MODEL")', {
  "openai(MODEL)": 'createOpenAI({ baseURL: "http://HOST:8000/v1", apiKey: KEY }), providerOptions: { openai: { store: false } }',
  anthropic: 'createAnthropic({ baseURL: "http://HOST:8000/v1", apiKey: KEY })',
});

const options = (s) => ({ name: "tandem", baseURL: s.base, apiKey: s.key });
const models = {
  "openai-compatible": (s) => createOpenAICompatible({ ...options(s), supportsStructuredOutputs: true })(s.model),
  "openai.chat": (s) => createOpenAI(options(s)).chat(s.model),
  "openai(MODEL)": (s) => createOpenAI(options(s))(s.model),
  anthropic: (s) => createAnthropic(options(s))(s.model),
};

const tools = (ran) => ({
  find_city: tool({ description: "Finds a city.", inputSchema: jsonSchema(check.FIND.parameters), execute: ran.findCity }),
  now: tool({ description: "Returns the time.", inputSchema: jsonSchema(check.NOW.parameters), execute: ran.now }),
});

const settings = { maxRetries: 0, providerOptions: { openai: { store: false } } };

for (const [name, model] of Object.entries(models)) {
  check.loop(`generateText, ${name}`, "whole", "loop of two tools", async (s) => {
    const ran = new check.Ran();
    const r = await generateText({ ...settings, model: model(s), tools: tools(ran), prompt: check.QUESTION, stopWhen: stepCountIs(5) });
    check.final(r.text);
    ran.verify(s);
  });
  check.loop(`streamText, ${name}`, "streamed", "loop of two tools", async (s) => {
    const ran = new check.Ran();
    let fault;
    const r = streamText({ ...settings, model: model(s), tools: tools(ran), prompt: check.QUESTION, stopWhen: stepCountIs(5), onError: ({ error }) => (fault = error) });
    let text = "";
    for await (const part of r.fullStream) if (part.type === "text-delta") text += part.text;
    if (fault) throw fault;
    check.final(text);
    ran.verify(s);
  });
}

for (const name of ["openai-compatible", "openai(MODEL)"]) {
  check.structured(`generateObject, ${name}`, "whole", "schema", async (s) => {
    const r = await generateObject({ ...settings, model: models[name](s), schema: jsonSchema(check.PET), prompt: "A pet.", seed: 3 });
    check.pet(r.object);
  });
  check.structured(`streamObject, ${name}`, "streamed", "schema", async (s) => {
    let fault;
    const r = streamObject({ ...settings, model: models[name](s), schema: jsonSchema(check.PET), prompt: "A pet.", seed: 3, onError: ({ error }) => (fault = error) });
    for await (const _ of r.partialObjectStream);
    if (fault) throw fault;
    check.pet(await r.object);
  });
}

check.run();
