"""Makes llamacpp.gz, a line of JSON and bytes behind it: GGUF files of the built-in model, as llama.cpp's own tools make them, and
the tokens that llama.cpp thinks likeliest. Run it here, next to torch, transformers, sentencepiece
and the dependencies of llama-cpp-python, with that package's source (0.3.36, which
bench/engine/llama.sh downloads) and the folder of the libllama.so built from it:

    SOURCE=FOLDER LLAMA_CPP_LIB_PATH=FOLDER python make_llamacpp.py [KEEP]

Converter, quantizer and model are llama.cpp's. Each file is the model with a SentencePiece
vocabulary, padded to 2,048 pieces. The files have 2 to 7 MB, so that only what the weights alone do not give
is kept of each: the bytes before its tensors (of most as differences from another's), the scales of
its K-quants, and its SHA-256, by which the test knows that it has made the same file. KEEP is a
folder for the files.
"""

import base64
import gzip
import hashlib
import io
import json
import os
import pathlib
import shutil
import sys
import tempfile

SOURCE = pathlib.Path(os.environ["SOURCE"])
sys.path[:0] = [str(SOURCE), str(SOURCE / "vendor/llama.cpp"), str(SOURCE / "vendor/llama.cpp/gguf-py")]
import gguf  # noqa: E402
import llama_cpp  # noqa: E402
import numpy  # noqa: E402
import sentencepiece  # noqa: E402
import torch  # noqa: E402
from conversion import ModelBase, get_model_architecture, get_model_class  # noqa: E402
from conversion.base import ModelType  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

HERE = pathlib.Path(__file__).parent
BUILTIN = HERE.parent.parent / "builtin"
PROMPT, PROMPTS = 80, 8  # tokens of each, and how many
# A text that begins with a space has one space more in llama.cpp than in transformers, and so has one behind a special token.
TEXTS = ["Hello world", "two  spaces\n\nand 12345 lines", "I'll we've DON'T", "naïve Ünïcödé 你好 🙂", "", "a\tb\r\n c", "What does strings.Split do?", "x   \n  x  "]
TYPES = {  # llama_ftype; 0: as the converter writes it
    "F16": 0, "BF16": 0, "Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18,
}


def conversations():
    lines = [json.loads(line) for line in (BUILTIN / "train/trained.jsonl").read_text().splitlines()]
    chats = [line for line in lines if line["kind"] == "chat"]
    return ["<|im_start|>user\n" + c["prompt"] + "<|im_end|>\n<|im_start|>assistant\n" + c["answer"] + "<|im_end|>\n" for c in chats]


def folder_of_model(folder):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(BUILTIN / "model" / name, folder)
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(conversations()), model_writer=out, model_type="bpe", vocab_size=2048, byte_fallback=True, character_coverage=1.0, hard_vocab_limit=False,
        normalization_rule_name="identity", remove_extra_whitespaces=False, num_threads=1, minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(out.getvalue())
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(tokenizer_class="LlamaTokenizer", legacy=False, add_bos_token=True)))


def convert(folder, path, kind):
    cls = get_model_class(get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT), mmproj=False)
    with torch.inference_mode():
        cls(folder, kind, path, eager=True).write()


def likeliest(path, prompts):
    """The likeliest token behind each token, and the ids of texts."""
    model = llama_cpp.Llama(str(path), n_ctx=512, logits_all=True, verbose=False, n_threads=1, seed=1)
    texts = [model.tokenize(t.encode(), add_bos=False, special=True) for t in TEXTS]
    tokens = []
    for prompt in prompts:
        model.reset()
        model.eval(prompt)
        tokens.append(model.scores[: len(prompt)].argmax(axis=1).tolist())
    return tokens, texts


def scales(tensor):
    """The bytes of K-quants that are not codes of weights."""
    blocks = tensor.data.reshape(-1, gguf.GGML_QUANT_SIZES[tensor.tensor_type][1])
    part = blocks[:, 192:210] if tensor.tensor_type == gguf.GGMLQuantizationType.Q6_K else blocks[:, :16]
    return part.tobytes()


def main():
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(BUILTIN / "model/tokenizer.json"))
    text = "".join(conversations()[3:])
    ids = tokenizer(text)["input_ids"]
    prompts = [ids[i * PROMPT : (i + 1) * PROMPT] for i in range(PROMPTS)]
    files, kept, heads = {}, {}, {}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        folder_of_model(folder)
        convert(folder, folder / "BF16.gguf", gguf.LlamaFileType.MOSTLY_BF16)
        convert(folder, folder / "F16.gguf", gguf.LlamaFileType.MOSTLY_F16)
        for name, kind in TYPES.items():
            path = folder / f"{name}.gguf"
            if kind:
                params = llama_cpp.llama_model_quantize_default_params()
                params.ftype, params.nthread = kind, 1
                assert llama_cpp.llama_model_quantize(str(folder / "BF16.gguf").encode(), str(path).encode(), params) == 0
            reader, data = gguf.GGUFReader(path), path.read_bytes()
            tokens, texts = likeliest(path, prompts)
            tensors = []
            for t in reader.tensors:
                kind = t.tensor_type.name
                tensors.append(dict(name=t.name, type=kind, shape=[int(n) for n in reversed(t.shape)], at=int(t.data_offset)))
                if kind.endswith("_K"):
                    kept[f"{t.name} {kind}"] = scales(t)
            head = numpy.frombuffer(data, numpy.uint8, min(t.data_offset for t in reader.tensors))
            base = "Q4_0" if TYPES[name] else "F16"  # the first one of the same tool
            heads[name] = head
            assert len(head) == len(heads[base])
            files[name] = dict(
                head=base64.b64encode((head if name == base else head ^ heads[base]).tobytes()).decode(), base=base, size=len(data), sha256=hashlib.sha256(data).hexdigest(), tensors=tensors, top=tokens,
            )
            print(f"{name}: {len(data)} bytes, {len({t for p in tokens for t in p})} likeliest tokens")
            if sys.argv[1:]:
                shutil.copy(path, sys.argv[1])
    result = dict(llama_cpp=llama_cpp.__version__, prompts=prompts, scales=[[name, len(part)] for name, part in kept.items()], files=files, texts=[dict(text=t, ids=i) for t, i in zip(TEXTS, texts)])
    with open(HERE / "llamacpp.gz", "wb") as f:
        with gzip.GzipFile(fileobj=f, mode="wb", mtime=0, filename="") as z:
            z.write(json.dumps(result, separators=(",", ":")).encode() + b"\n")
            for part in kept.values():
                z.write(part)
    (HERE / "llamacpp.gz").chmod(0o644)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
