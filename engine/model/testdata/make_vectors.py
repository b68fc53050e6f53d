"""Makes vectors/last and vectors/mean, tiny random models that give vectors, and
vectors/goldens.json.gz: for these and some checkpoints of make_goldens.py, the row of the last
token and the mean of all rows behind the last norm, as Hugging Face transformers computes them in
float32. vectors/scores has a classifier of three labels, with what it makes of the last token. For
models with an output projection, logits are those of the tokens 5 and 9 after the last one. Run it
here:

    python make_vectors.py

The folders are saved as sentence-transformers has them: the model without its output
projection, modules.json, and the config of the module Pooling.
"""

import gzip
import json
import pathlib
import shutil

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from make_goldens import COMMON, fill

ROOT = pathlib.Path(__file__).parent
SHAPE = dict(vocab_size=96, hidden_size=40, intermediate_size=72, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=640)
ROPE = dict(rope_type="default", rope_theta=10000.0)

FOLDERS = {
    # as Qwen3-Embedding: normalised, any first numbers are a vector
    "vectors/last": dict(
        seed=901, pooling={"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, normalize=True, more={},
        config=dict(SHAPE, model_type="qwen3", head_dim=24, tie_word_embeddings=True, use_sliding_window=False, rope_parameters=ROPE),
    ),
    # a window, an untied projection that was not saved, vectors that keep their length
    "vectors/mean": dict(
        seed=902, pooling={"pooling_mode_mean_tokens": True}, normalize=False, more=dict(matryoshka_dimensions=[8, 16, 40]),
        config=dict(SHAPE, model_type="mistral", sliding_window=37, tie_word_embeddings=False, rope_parameters=ROPE),
    ),
}
CLASSIFIER = dict(SHAPE, model_type="qwen3", head_dim=14, tie_word_embeddings=False, use_sliding_window=False, num_labels=3, pad_token_id=0, rope_parameters=ROPE)
OTHERS = ["qwen3", "gemma4-ple", "olmo2", "deepseek-v2", "granite"]
PROMPTS = [1, 2, 16, 17, 33, 130]
LONG = 600


def make(name, spec):
    folder = ROOT / name
    shutil.rmtree(folder, ignore_errors=True)
    model = AutoModel.from_config(AutoConfig.for_model(**(COMMON | spec["config"])))
    model.float().eval()
    fill(model, spec["seed"], 1.0)
    model.to(torch.bfloat16).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | spec["more"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")] + [("2_Normalize", "Normalize")] * spec["normalize"]
    (folder / "modules.json").write_text(json.dumps(
        [dict(idx=i, name=str(i), path=p, type=f"sentence_transformers.models.{kind}") for i, (p, kind) in enumerate(modules)], indent=2) + "\n")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps(dict(word_embedding_dimension=SHAPE["hidden_size"], include_prompt=True) | spec["pooling"], indent=2) + "\n")


def make_classifier(folder):
    shutil.rmtree(folder, ignore_errors=True)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**(COMMON | CLASSIFIER)))
    model.float().eval()
    fill(model, 903, 1.0)
    model.to(torch.bfloat16).save_pretrained(folder)


def rounded(values):
    return [float(f"{v:.9g}") for v in values.tolist()]


def vectors(name, lengths):
    model = AutoModel.from_pretrained(ROOT / name, dtype=torch.float32, attn_implementation="eager").eval()
    kind = AutoModelForSequenceClassification if name == "vectors/scores" else AutoModelForCausalLM
    head = None if name in FOLDERS else kind.from_pretrained(ROOT / name, dtype=torch.float32, attn_implementation="eager").eval()
    rng = torch.Generator().manual_seed(7)
    cases = []
    for n in lengths:
        prompt = torch.randint(3, model.config.vocab_size, (n,), generator=rng).tolist()
        with torch.no_grad():
            rows = model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
            case = dict(prompt=prompt, last=rounded(rows[-1]), mean=rounded(rows.double().mean(0)))
            if head is not None:
                out = head(torch.tensor([prompt]), use_cache=False).logits[0]
                case |= dict(scores=rounded(out)) if name == "vectors/scores" else dict(logits=rounded(out[-1][[5, 9]]))
        cases.append(case)
    return cases


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, spec in FOLDERS.items():
        make(name, spec)
    make_classifier(ROOT / "vectors/scores")
    all = {name: vectors(name, PROMPTS + [LONG]) for name in FOLDERS} | {name: vectors(name, PROMPTS) for name in OTHERS + ["vectors/scores"]}
    text = json.dumps(dict(transformers=transformers.__version__, torch=torch.__version__, models=all), separators=(",", ":"))
    with open(ROOT / "vectors/goldens.json.gz", "wb") as f:
        with gzip.GzipFile(fileobj=f, mode="wb", mtime=0, filename="") as z:
            z.write(text.encode())
    for name in [*FOLDERS, "vectors/scores"]:
        for path in [p for p in (ROOT / name).rglob("*") if p.is_file()]:
            path.chmod(0o644)
