// Writes the ranks of o200k_base, which npm's gpt-tokenizer carries, as a JSON array of base64.
// node ranks.mjs FOLDER_OF_GPT_TOKENIZER > ranks.json
import { resolve } from 'node:path'
import { pathToFileURL } from 'node:url'

const file = resolve(process.argv[2], 'esm/bpeRanks/o200k_base.js')
const { default: ranks } = await import(pathToFileURL(file))
const bytes = (t) => (typeof t === 'string' ? Buffer.from(t, 'utf8') : Buffer.from(t ?? []))
process.stdout.write(JSON.stringify(Array.from(ranks, (t) => bytes(t).toString('base64'))))
