// The @anthropic-ai/sdk package.
"use strict";

const assert = require("node:assert/strict");
const Anthropic = require("@anthropic-ai/sdk");
const check = require("./check.cjs");

check.client("anthropic (Node)", "@anthropic-ai/sdk", 'new Anthropic({ baseURL: "http://HOST:8000", apiKey: KEY })');

const TOOLS = [check.FIND, check.NOW].map((f) => ({ name: f.name, description: f.description, input_schema: f.parameters }));
const connect = (s) => new (Anthropic.default ?? Anthropic)({ baseURL: s.url, apiKey: s.key, maxRetries: 0, timeout: 60_000 });

// Runs a loop of messages. Thinking goes back as it came.
async function loop(server, ask) {
  const messages = [{ role: "user", content: check.QUESTION }];
  let m = await ask(messages);
  assert.equal(m.stop_reason, "tool_use");
  const uses = m.content.filter((b) => b.type === "tool_use");
  check.verify(server, uses.map((b) => [b.name, b.input]));
  messages.push({ role: "assistant", content: m.content });
  messages.push({ role: "user", content: uses.map((b, i) => ({ type: "tool_result", tool_use_id: b.id, content: [check.CITY, check.TIME][i] })) });
  m = await ask(messages);
  assert.equal(m.stop_reason, "end_turn");
  check.final(m.content.map((b) => b.text ?? "").join(""));
}

check.loop("messages.create", "whole", "loop of two tools", (s) =>
  loop(s, (messages) => connect(s).messages.create({ model: s.model, max_tokens: 2000, messages, tools: TOOLS })));

// What a streamed and a whole answer have in common: the text of each kind, and the calls without their ids.
function shape(blocks) {
  const texts = {};
  for (const b of blocks) if (b.type !== "tool_use") texts[b.type] = (texts[b.type] ?? "") + b[b.type];
  return [texts, blocks.filter((b) => b.type === "tool_use").map((b) => [b.name, b.input])];
}

check.loop("messages.create", "streamed", "loop of two tools", (s) =>
  loop(s, async (messages) => {
    const asked = { model: s.model, max_tokens: 2000, messages, tools: TOOLS };
    const types = [];
    const blocks = [];
    let end;
    for await (const event of await connect(s).messages.create({ ...asked, stream: true })) {
      types.push(event.type);
      if (event.type === "content_block_start") {
        assert.equal(event.index, blocks.length);
        blocks.push({ ...event.content_block, input: "" });
      } else if (event.type === "content_block_delta") {
        assert.equal(event.index, blocks.length - 1);
        for (const [member, value] of Object.entries(event.delta)) if (member !== "type") blocks.at(-1)[member === "partial_json" ? "input" : member] += value;
      } else if (event.type === "message_delta") end = event.delta;
    }
    assert.deepEqual([types[0], ...types.slice(-2)], ["message_start", "message_delta", "message_stop"]);
    for (const b of blocks) b.input = JSON.parse(b.input || "{}");
    const whole = await connect(s).messages.create(asked);
    assert.deepEqual(shape(blocks), shape(whole.content));
    assert.equal(end.stop_reason, whole.stop_reason);
    return whole;
  }));

check.loop("messages.stream", "streamed", "helper, loop of two tools", (s) =>
  loop(s, (messages) => connect(s).messages.stream({ model: s.model, max_tokens: 2000, messages, tools: TOOLS }).finalMessage()));

check.loop("beta.messages.toolRunner", "whole", "helper, loop of two tools", async (s) => {
  const ran = new check.Ran();
  const tools = TOOLS.map((t) => ({ ...t, type: "custom", run: t.name === "now" ? ran.now : ran.findCity, parse: (v) => v }));
  const messages = [{ role: "user", content: check.QUESTION }];
  const m = await connect(s).beta.messages.toolRunner({ model: s.model, max_tokens: 2000, messages, tools });
  check.final(m.content.map((b) => b.text ?? "").join(""));
  ran.verify(s);
});

check.run();
