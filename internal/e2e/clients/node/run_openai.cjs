// The openai package.
"use strict";

const assert = require("node:assert/strict");
const OpenAI = require("openai");
const check = require("./check.cjs");

check.client("openai (Node)", "openai", 'new OpenAI({ baseURL: "http://HOST:8000/v1", apiKey: KEY })', {
  responses: "responses.create({ store: false, input: itemsOfAllTurns })",
});

const connect = (s) => new OpenAI({ baseURL: s.base, apiKey: s.key, maxRetries: 0, timeout: 60_000 });

// Runs a loop of chats. ask returns a choice.
async function chatLoop(server, ask) {
  const messages = [{ role: "user", content: check.QUESTION }];
  let { message, finish_reason } = await ask(messages);
  assert.equal(finish_reason, "tool_calls");
  check.verify(server, message.tool_calls.map((c) => [c.function.name, c.function.arguments]));
  messages.push(message);
  [check.CITY, check.TIME].forEach((content, i) => messages.push({ role: "tool", tool_call_id: message.tool_calls[i].id, content }));
  ({ message, finish_reason } = await ask(messages));
  assert.equal(finish_reason, "stop");
  check.final(message.content);
}

check.loop("chat.completions.create", "whole", "loop of two tools", (s) =>
  chatLoop(s, async (messages) => {
    const r = await connect(s).chat.completions.create({ model: s.model, messages, tools: check.TOOLS, tool_choice: "auto" });
    return r.choices[0];
  }));

check.loop("chat.completions.create", "streamed", "loop of two tools", (s) =>
  chatLoop(s, async (messages) => {
    const asked = { model: s.model, messages, tools: check.TOOLS, tool_choice: "auto", seed: 7 };
    const stream = await connect(s).chat.completions.create({ ...asked, stream: true });
    const message = { role: "assistant", content: "" };
    let finish_reason = null;
    for await (const chunk of stream) {
      for (const c of chunk.choices) {
        message.content += c.delta.content ?? "";
        finish_reason = c.finish_reason ?? finish_reason;
        for (const call of c.delta.tool_calls ?? []) {
          message.tool_calls ??= [];
          if (call.id) {
            assert.equal(call.index, message.tool_calls.length);
            message.tool_calls.push({ id: call.id, type: call.type, function: { name: call.function.name, arguments: "" } });
          }
          message.tool_calls[call.index].function.arguments += call.function.arguments ?? "";
        }
      }
    }
    const [whole] = (await connect(s).chat.completions.create(asked)).choices;
    assert.deepEqual([message.content, message.tool_calls ?? [], finish_reason], [whole.message.content ?? "", whole.message.tool_calls ?? [], whole.finish_reason]);
    return { message, finish_reason };
  }));

check.loop("chat.completions.stream", "streamed", "helper, loop of two tools", (s) =>
  chatLoop(s, async (messages) => {
    const stream = connect(s).chat.completions.stream({ model: s.model, messages, tools: check.TOOLS, tool_choice: "auto" });
    let chunks = 0;
    stream.on("chunk", () => chunks++);
    const r = await stream.finalChatCompletion();
    assert.ok(chunks > 3, `${chunks} chunks`);
    return r.choices[0];
  }));

const runnable = (ran) => [
  { type: "function", function: { ...check.FIND, function: ran.findCity, parse: JSON.parse } },
  { type: "function", function: { ...check.NOW, function: ran.now, parse: (text) => JSON.parse(text || "{}") } },
];

for (const stream of [false, true])
  check.loop("chat.completions.runTools", stream ? "streamed" : "whole", "helper, loop of two tools", async (s) => {
    const ran = new check.Ran();
    const messages = [{ role: "user", content: check.QUESTION }];
    const runner = connect(s).chat.completions.runTools({ model: s.model, messages, tools: runnable(ran), stream });
    check.final(await runner.finalContent());
    ran.verify(s);
  });

const FLAT = [check.FIND, check.NOW].map((f) => ({ type: "function", strict: false, ...f }));

const deltaTypes = ["response.output_text.delta", "response.reasoning_text.delta", "response.function_call_arguments.delta"];

// What the deltas of a stream added to each item is the response.
function verifyDeltas(events, response) {
  const texts = {};
  for (const e of events) if (deltaTypes.includes(e.type)) texts[e.output_index] = (texts[e.output_index] ?? "") + e.delta;
  const want = {};
  response.output.forEach((item, n) => {
    const text = item.type === "function_call" ? item.arguments : (item.content ?? []).map((p) => p.text).join("");
    if (text) want[n] = text;
  });
  assert.deepEqual(texts, want);
}

// Runs a loop of responses, which are not stored.
async function responsesLoop(server, ask) {
  const input = [{ role: "user", content: check.QUESTION }];
  const r = await ask(input);
  const calls = r.output.filter((i) => i.type === "function_call");
  check.verify(server, calls.map((c) => [c.name, c.arguments]));
  input.push(...r.output);
  [check.CITY, check.TIME].forEach((output, i) => input.push({ type: "function_call_output", call_id: calls[i].call_id, output }));
  check.final((await ask(input)).output_text);
}

check.loop("responses.create", "whole", "loop of two tools", (s) =>
  responsesLoop(s, (input) => connect(s).responses.create({ model: s.model, input, tools: FLAT, tool_choice: "auto", store: false })));

check.loop("responses.create", "streamed", "loop of two tools", (s) =>
  responsesLoop(s, async (input) => {
    const events = [];
    for await (const event of await connect(s).responses.create({ model: s.model, input, tools: FLAT, tool_choice: "auto", store: false, stream: true })) {
      assert.equal(event.sequence_number, events.length);
      events.push(event);
    }
    const last = events.at(-1);
    assert.equal(last.type, "response.completed");
    verifyDeltas(events, last.response);
    const text = last.response.output.flatMap((i) => i.content ?? []).map((c) => (c.type === "output_text" ? c.text : "")).join("");
    return { ...last.response, output_text: text };
  }));

check.loop("responses.stream", "streamed", "helper, loop of two tools", (s) =>
  responsesLoop(s, async (input) => {
    const events = [];
    const stream = connect(s).responses.stream({ model: s.model, input, tools: FLAT, tool_choice: "auto", store: false });
    stream.on("event", (e) => events.push(e));
    const r = await stream.finalResponse();
    verifyDeltas(events, r);
    return r;
  }));

const ASK = [{ role: "user", content: "A pet, as JSON." }];
const FORMAT = { name: "pet", strict: true, schema: check.PET };

check.structured("chat.completions.parse", "whole", "schema", async (s) => {
  const r = await connect(s).chat.completions.parse({ model: s.model, messages: ASK, response_format: { type: "json_schema", json_schema: FORMAT }, seed: 3 });
  check.pet(JSON.parse(r.choices[0].message.content));
});

check.structured("chat.completions.stream", "streamed", "schema", async (s) => {
  const stream = connect(s).chat.completions.stream({ model: s.model, messages: ASK, response_format: { type: "json_schema", json_schema: FORMAT }, seed: 3 });
  check.pet(JSON.parse((await stream.finalChatCompletion()).choices[0].message.content));
});

check.structured("responses.parse", "whole", "schema", async (s) => {
  const r = await connect(s).responses.parse({ model: s.model, input: ASK, text: { format: { type: "json_schema", ...FORMAT } }, store: false });
  check.pet(JSON.parse(r.output_text));
});

check.run();
