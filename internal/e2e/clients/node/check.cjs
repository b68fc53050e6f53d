// Runs the checks of one client and prints a line of JSON for each, as python/check.py does.
// Packages come from NODE_PATH.
"use strict";

const assert = require("node:assert/strict");
const fs = require("node:fs");
const path = require("node:path");

const CITY = "Oslo";
const TIME = "12:00";
const QUESTION = "Which city is it, and what time?";
const FIND = { name: "find_city", description: "Finds a city.", parameters: { type: "object", properties: { q: { type: "string" } }, required: ["q"] } };
const NOW = { name: "now", description: "Returns the time.", parameters: { type: "object", properties: {} } };
const TOOLS = [FIND, NOW].map((f) => ({ type: "function", function: f }));

const PET = {
  type: "object",
  properties: {
    animal: { type: "string", enum: ["cat", "bird", "dragon"] },
    age: { type: "integer", minimum: 0, maximum: 99 },
    tame: { type: "boolean" },
    names: { type: "array", items: { type: "string", enum: ["Ada", "Bo"] }, maxItems: 2 },
  },
  required: ["animal", "age", "tame", "names"],
  additionalProperties: false,
};

// A value has the type PET.
function pet(v) {
  assert.deepEqual(Object.keys(v).sort(), ["age", "animal", "names", "tame"]);
  assert.ok(["cat", "bird", "dragon"].includes(v.animal) && Number.isInteger(v.age) && v.age >= 0 && v.age <= 99 && typeof v.tame === "boolean", JSON.stringify(v));
  assert.ok(v.names.length <= 2 && v.names.every((n) => ["Ada", "Bo"].includes(n)), JSON.stringify(v));
}

// The calls that the client returned, as [name, arguments], are those of the answer.
function verify(server, calls) {
  const read = calls.map(([name, a]) => [name, typeof a === "string" ? JSON.parse(a) : a]);
  assert.deepEqual(read, server.calls.map((c) => [c.Name, c.Arguments]));
}

// The answer behind the loop has the results of both tools once, in order, and nothing after them.
function final(text) {
  assert.match(text ?? "", new RegExp(`Found: [^;]*${CITY}[^;]*; [^;]*${TIME}[^;]*[.]$`));
  assert.equal(text.split("Found:").length, 2, text);
}

// Tools that record how they were called.
class Ran {
  calls = [];
  findCity = ({ q }) => (this.calls.push(["find_city", q]), CITY);
  now = () => (this.calls.push(["now", null]), TIME);
  // Both tools ran once. A client may run them in any order.
  verify(server) {
    assert.deepEqual(this.calls.sort(), [["find_city", server.calls[0].Arguments.q], ["now", null]]);
  }
}

// The reason of a server that refused a request; undefined: the error is another one.
function refusal(e) {
  for (const seen = new Set(); e && !seen.has(e); e = e.cause ?? e.lastError) {
    seen.add(e);
    const status = e.status ?? e.statusCode;
    if ([400, 404, 501].includes(status)) {
      const body = e.error?.error ?? e.error ?? e.data?.error ?? {};
      return body.message ?? e.message;
    }
  }
  return undefined;
}

const checks = [];
let named = {};

function version(name) {
  for (const folder of (process.env.NODE_PATH ?? "").split(path.delimiter)) {
    const file = path.join(folder, name, "package.json");
    if (fs.existsSync(file)) return JSON.parse(fs.readFileSync(file, "utf8")).version;
  }
  throw new Error(`no package ${name} in NODE_PATH`);
}

const client = (name, pkg, config, configs) => (named = { client: name, package: pkg, version: version(pkg), config, configs });
const add = (kind) => (surface, mode, ran, f) => checks.push({ kind, surface, mode, ran, f });
const loop = add("formats");
const structured = add("models");

// The check ends within its bound, or fails.
function bounded(promise) {
  let timer;
  const late = new Promise((_, fail) => (timer = setTimeout(() => fail(new Error("no end within 120 s")), 120_000)));
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

async function run() {
  const setup = JSON.parse(fs.readFileSync(process.argv[2], "utf8"));
  console.log(JSON.stringify(named));
  for (const { kind, surface, mode, ran, f } of checks) {
    const result = { kind, surface, mode, ran, of: 0, ok: 0, refused: [], failed: [] };
    for (const s of setup[kind]) {
      result.of++;
      try {
        await bounded(f({ ...s, base: s.url + "/v1", key: setup.key }));
        result.ok++;
      } catch (e) {
        const why = refusal(e);
        if (why !== undefined) result.refused.push({ name: s.name, why });
        else result.failed.push({ name: s.name, why: String(e?.stack ?? e).slice(0, 3000) });
      }
    }
    console.log(JSON.stringify(result));
  }
}

module.exports = { CITY, TIME, QUESTION, TOOLS, FIND, NOW, PET, pet, verify, final, Ran, client, loop, structured, run };
