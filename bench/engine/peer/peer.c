// peer times steps of llama.cpp for bench/engine: peer FILE THREADS CONTEXT PROMPT loads a GGUF
// file and reads commands from its standard input, a line each. It answers each with a line.
//
//   decode SEQUENCES STEPS   the seconds of so many steps, each of one token of so many sequences
//                            that have CONTEXT tokens
//   prefill                  the seconds of a step of PROMPT tokens
//
// A step is llama_decode and llama_synchronize, as llama-bench times it. Nothing is sampled.
#include <llama.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LONGEST = 1024, SEQUENCES = 64 };

static struct llama_model *model;
static int threads, context, prompt, vocab;
static struct llama_context *contexts[SEQUENCES + 1]; // by the number of sequences, filled

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void fail(const char *what) {
	fprintf(stderr, "peer: %s\n", what);
	exit(1);
}

static void quiet(enum ggml_log_level level, const char *text, void *unused) {
	(void)unused;
	if (level == GGML_LOG_LEVEL_ERROR)
		fputs(text, stderr);
}

static struct llama_context *new_context(int sequences) {
	struct llama_context_params p = llama_context_default_params();
	p.n_ctx = (uint32_t)(LONGEST * sequences);
	p.n_seq_max = (uint32_t)sequences;
	p.n_outputs_max = (uint32_t)sequences;
	p.n_batch = p.n_ubatch = (uint32_t)(prompt > sequences ? prompt : sequences);
	p.n_threads = p.n_threads_batch = threads;
	p.kv_unified = false; // faster for sequences without a common prefix
	struct llama_context *c = llama_init_from_model(model, p);
	if (!c)
		fail("no context");
	return c;
}

// Computes n tokens from position `from` on of sequences [first, last).
static void step(struct llama_context *c, int first, int last, int from, int n) {
	struct llama_batch b = llama_batch_init((last - first) * n, 0, 1);
	for (int s = first; s < last; s++)
		for (int i = 0; i < n; i++) {
			int at = b.n_tokens++;
			b.token[at] = (int)(((long)(from + i) * 7919 + (long)s * 104729) % vocab);
			b.pos[at] = from + i;
			b.n_seq_id[at] = 1;
			b.seq_id[at][0] = s;
			b.logits[at] = i == n - 1;
		}
	if (llama_decode(c, b))
		fail("llama_decode");
	llama_synchronize(c);
	llama_batch_free(b);
}

static double decode(int sequences, int steps) {
	if (sequences < 1 || sequences > SEQUENCES || steps < 1 || context + steps > LONGEST)
		fail("bad number of sequences or steps");
	struct llama_context **c = &contexts[sequences];
	if (!*c) {
		*c = new_context(sequences);
		for (int s = 0; s < sequences; s++)
			step(*c, s, s + 1, 0, context);
		step(*c, 0, sequences, context, 1);
	}
	for (int s = 0; s < sequences; s++)
		llama_memory_seq_rm(llama_get_memory(*c), s, context, -1);
	double began = now();
	for (int i = 0; i < steps; i++)
		step(*c, 0, sequences, context + i, 1);
	return now() - began;
}

static double prefill(void) {
	static struct llama_context *c;
	if (!c) {
		c = new_context(1);
		step(c, 0, 1, 0, prompt);
	}
	llama_memory_clear(llama_get_memory(c), false);
	double began = now();
	step(c, 0, 1, 0, prompt);
	return now() - began;
}

int main(int argc, char **argv) {
	if (argc != 5)
		fail("usage: peer FILE THREADS CONTEXT PROMPT");
	threads = atoi(argv[2]), context = atoi(argv[3]), prompt = atoi(argv[4]);
	if (threads < 1 || context < 1 || prompt < 1 || prompt > LONGEST || context > LONGEST)
		fail("bad number of threads or tokens");
	llama_log_set(quiet, NULL);
	llama_backend_init();
	model = llama_model_load_from_file(argv[1], llama_model_default_params());
	if (!model)
		fail("the file does not load");
	vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
	char line[64];
	while (fgets(line, sizeof line, stdin)) {
		int sequences, steps;
		double seconds;
		if (sscanf(line, "decode %d %d", &sequences, &steps) == 2)
			seconds = decode(sequences, steps);
		else if (!strcmp(line, "prefill\n"))
			seconds = prefill();
		else
			fail("unknown command");
		printf("%.9f\n", seconds);
		fflush(stdout);
	}
	return 0;
}
