// The official OpenAI client for Node against a running cluster.
//
//     node openai_client.cjs BASE_URL      every claim below, one "ok" line each
//
// The key comes from OPENAI_API_KEY and the package from NODE_PATH; the binary tests
// of the package above run it.
"use strict";

const assert = require("node:assert/strict");
const OpenAI = require("openai");
const VERSION = require("openai/version").VERSION;

const base = process.argv[2];
const QUESTION = [{ role: "user", content: "What is prefill?" }];
const GREEDY = { temperature: 0, max_tokens: 40 };

const connect = (more) => new OpenAI({ baseURL: base, timeout: 60_000, maxRetries: 0, ...more });
const client = connect();

// Model that the server lists; the claim "models" has looked at the list.
let model;

const chat = (more, options) => client.chat.completions.create({ model, messages: QUESTION, ...GREEDY, ...more }, options);
const complete = (more) => client.completions.create({ model, prompt: "Once upon a time", ...GREEDY, ...more });

// All chunks of a stream.
async function drain(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

// What the chunks say for one choice: its text and its finish reasons.
function joined(chunks, index, text) {
  const mine = chunks.flatMap((c) => c.choices).filter((c) => c.index === index);
  return { text: mine.map((c) => text(c) ?? "").join(""), finish: mine.map((c) => c.finish_reason).filter(Boolean) };
}

// The call is refused with exactly this class of error, whose text has the words.
async function refused(kind, status, call, ...words) {
  let error;
  try {
    await call();
  } catch (e) {
    error = e;
  }
  assert.ok(error, `no ${kind.name}`);
  assert.equal(error.constructor, kind, `${error.constructor.name} in place of ${kind.name}: ${error}`);
  assert.equal(error.status, status);
  assert.ok(error.error?.message && error.type, `no body: ${error}`);
  for (const word of words) assert.ok(error.message.includes(word), `"${word}" is not in ${error.message}`);
}

const claims = {
  async models() {
    const listed = await drain(await client.models.list());
    assert.equal(listed.length, 1);
    assert.equal(listed[0].object, "model");
    model = listed[0].id;
    assert.equal((await client.models.retrieve(model)).id, model);
  },

  async chat() {
    const r = await chat();
    assert.equal(r.object, "chat.completion");
    assert.equal(r.model, model);
    assert.equal(r.choices[0].message.role, "assistant");
    assert.ok(r.choices[0].message.content.trim());
    assert.ok(["stop", "length"].includes(r.choices[0].finish_reason));
    assert.ok(r.usage.prompt_tokens > 0 && r.usage.completion_tokens > 0 && r.usage.completion_tokens <= 40);
    assert.equal(r.usage.total_tokens, r.usage.prompt_tokens + r.usage.completion_tokens);
  },

  async chat_stream() {
    const whole = await chat();
    const chunks = await drain(await chat({ stream: true, stream_options: { include_usage: true } }));
    assert.ok(chunks.every((c) => c.object === "chat.completion.chunk" && c.id === chunks[0].id));
    assert.equal(chunks[0].choices[0].delta.role, "assistant");
    const { text, finish } = joined(chunks, 0, (c) => c.delta.content);
    assert.equal(text, whole.choices[0].message.content);
    assert.deepEqual(finish, [whole.choices[0].finish_reason]);
    assert.equal(chunks.at(-1).choices.length, 0);
    assert.deepEqual(chunks.at(-1).usage, whole.usage);
  },

  // What the client itself puts together from a stream, as its users do.
  async chat_runner() {
    const whole = await chat();
    const runner = client.chat.completions.stream({ model, messages: QUESTION, ...GREEDY });
    assert.equal(await runner.finalContent(), whole.choices[0].message.content);
    assert.equal((await runner.finalChatCompletion()).choices[0].finish_reason, whole.choices[0].finish_reason);
  },

  async completion() {
    const r = await complete({ max_tokens: 12 });
    assert.equal(r.object, "text_completion");
    assert.ok(r.choices[0].text);
    assert.ok(r.usage.completion_tokens > 0 && r.usage.completion_tokens <= 12);
    const chunks = await drain(await complete({ max_tokens: 12, stream: true, stream_options: { include_usage: true } }));
    assert.deepEqual(joined(chunks, 0, (c) => c.text), { text: r.choices[0].text, finish: [r.choices[0].finish_reason] });
    assert.deepEqual(chunks.at(-1).usage, r.usage);
  },

  async token_ids() {
    const r = await complete({ prompt: Array.from({ length: 40 }, (_, i) => 400 + i), max_tokens: 7, ignore_eos: true });
    assert.deepEqual([r.usage.prompt_tokens, r.usage.completion_tokens, r.choices[0].finish_reason], [40, 7, "length"]);
  },

  async logprobs() {
    const wanted = { logprobs: true, top_logprobs: 3, max_tokens: 8, ignore_eos: true };
    const whole = (await chat(wanted)).choices[0].logprobs.content;
    assert.equal(whole.length, 8);
    for (const t of whole) {
      assert.ok(t.logprob <= 0 && t.top_logprobs.length === 3, JSON.stringify(t));
      assert.equal(t.top_logprobs[0].token, t.token, "temperature 0 takes the likeliest");
    }
    const chunks = await drain(await chat({ ...wanted, stream: true }));
    assert.deepEqual(chunks.flatMap((c) => c.choices).flatMap((c) => c.logprobs?.content ?? []), whole);
    const told = (await complete({ logprobs: 2, max_tokens: 8, ignore_eos: true })).choices[0].logprobs;
    assert.ok(told.tokens.length === 8 && told.token_logprobs.every((v) => v <= 0) && Object.keys(told.top_logprobs[0]).length >= 2);
  },

  async several() {
    const wanted = { n: 2, temperature: 1, seed: 5, max_tokens: 12 };
    const whole = (await chat(wanted)).choices;
    assert.deepEqual(whole.map((c) => c.index), [0, 1]);
    const chunks = await drain(await chat({ ...wanted, stream: true }));
    for (const c of whole) {
      assert.deepEqual(joined(chunks, c.index, (x) => x.delta.content), { text: c.message.content, finish: [c.finish_reason] });
    }
    const prompts = await complete({ ...wanted, prompt: ["one two", "three four"], max_tokens: 6 });
    assert.deepEqual(prompts.choices.map((c) => c.index), [0, 1, 2, 3]);
  },

  async seeds() {
    const draw = async (seed) => (await chat({ temperature: 1.5, seed })).choices[0].message.content;
    assert.equal(await draw(7), await draw(7), "one seed, two answers");
    assert.ok(new Set(await Promise.all([1, 2, 3, 4, 5, 6].map(draw))).size > 1, "six seeds, one answer");
  },

  async stops() {
    const whole = (await chat()).choices[0].message.content;
    const word = whole.split(/\s+/)[2];
    const want = { text: whole.slice(0, whole.indexOf(word)), finish: ["stop"] };
    const r = (await chat({ stop: word })).choices[0];
    assert.deepEqual({ text: r.message.content, finish: [r.finish_reason] }, want);
    assert.deepEqual(joined(await drain(await chat({ stop: [word], stream: true })), 0, (c) => c.delta.content), want);
  },

  async concurrent() {
    const answers = await Promise.all(Array.from({ length: 24 }, () => chat()));
    assert.equal(new Set(answers.map((r) => r.choices[0].message.content)).size, 1);
  },

  async unknown_model() {
    await refused(OpenAI.NotFoundError, 404, () => chat({ model: "luck" }), "luck");
    await refused(OpenAI.NotFoundError, 404, () => chat({ model: "luck", stream: true }), "luck");
    await refused(OpenAI.NotFoundError, 404, () => client.models.retrieve("luck"), "luck");
  },

  async bad_parameters() {
    const bad = (more, ...words) => refused(OpenAI.BadRequestError, 400, () => chat(more), ...words);
    await bad({ temperature: -1 }, "temperature", "-1");
    await bad({ max_tokens: 0 }, "max_tokens");
    await bad({ messages: [] }, "messages");
    await bad({ n: 0, stream: true }, "n");
    await bad({ messages: [{ role: "user", content: "word ".repeat(5000) }] }, "2048");
    await refused(OpenAI.BadRequestError, 400, () => complete({ prompt: [1, 1_000_000] }), "1000000");
  },

  async bad_key() {
    for (const apiKey of ["sk-wrong", "sk-of-the-tes", "sk-of-the-test2"]) {
      await refused(OpenAI.AuthenticationError, 401, () => connect({ apiKey }).models.list());
    }
  },

  async embeddings() {
    const input = ["The fox is quick.", "A dog."];
    const packed = await client.embeddings.create({ model: "", input }); // the client asks for base64
    const lists = await client.embeddings.create({ model: "", input, encoding_format: "float", dimensions: 8 });
    assert.deepEqual(packed.data.map((d) => d.index), [0, 1]);
    for (const { embedding } of [...packed.data, ...lists.data]) {
      assert.ok(Math.abs(embedding.reduce((sum, x) => sum + x * x, 0) - 1) < 1e-5, embedding.join());
    }
    assert.equal(lists.data[1].embedding.length, 8);
    assert.ok(packed.usage.total_tokens > 0 && packed.usage.total_tokens === packed.usage.prompt_tokens);
  },

  async headers() {
    const { data, request_id } = await chat({ max_tokens: 2 }).withResponse();
    assert.ok(request_id, "no x-request-id");
    assert.equal(data.choices[0].finish_reason, "length");
  },

  // Streams that would go on for long are left after their first chunk, by both of
  // the client's ways. That their nodes are free then, the test sees on the nodes.
  async hang_up() {
    await Promise.all(Array.from({ length: 4 }, async (_, i) => {
      const stream = await chat({ max_tokens: 1500, ignore_eos: true, stream: true });
      for await (const chunk of stream) {
        assert.equal(chunk.choices[0].finish_reason, null);
        if (i % 2) break;
        stream.controller.abort();
      }
    }));
  },
};

async function main() {
  console.log("node", process.version, "openai", VERSION);
  for (const [name, claim] of Object.entries(claims)) {
    const began = performance.now();
    try {
      await claim();
      console.log(`ok ${name} ${((performance.now() - began) / 1000).toFixed(2)} s`);
    } catch (e) {
      process.exitCode = 1;
      console.log(`FAILED ${name}: ${e.stack ?? e}`);
    }
  }
}

main();
