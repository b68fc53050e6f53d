#!/bin/sh
# Trains the built-in model from nothing and evaluates it. By hand only, never in CI.
#   engine/builtin/train/run.sh WORK_DIR [STEPS]
# WORK_DIR keeps the checkpoint: stop it with Ctrl-C at any time and start it again with the same arguments.
set -eu
[ $# -ge 1 ] || { sed -n 2,4p "$0"; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
work=$1 steps=${2:-3000}
[ -d "$work/venv" ] || python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q -r "$here/requirements.txt"
(cd "$here" && "$work/venv/bin/python" -m unittest -q test_corpus)
"$work/venv/bin/python" "$here/train.py" --work "$work" --steps "$steps"
"$work/venv/bin/python" "$here/evaluate.py" "$work/hf" --own
"$work/venv/bin/python" "$here/evaluate.py" "$work/hf"
echo "The model is in $work/hf. To ship it: copy it over engine/builtin/model, write eval.jsonl with"
echo "  evaluate.py $work/hf --write-eval engine/builtin/eval.jsonl"
echo "write parity.json with"
echo "  parity.py engine/builtin/model"
echo "and put the table above into MODEL_CARD.md."
