"""Validates outputs for bench/grammar with jsonschema.

Reads {"schema": …, "outputs": [text, …]} a line and answers {"invalid": [message, …], "skipped": n}.
A schema that jsonschema cannot read is skipped.
"""

import json
import sys

import jsonschema


def pairs(items):
    """Refuses objects with a key twice: what they mean differs between readers."""
    if len({k for k, _ in items}) != len(items):
        raise KeyError("repeated key")
    return dict(items)


def main():
    for line in sys.stdin:
        request = json.loads(line)
        schema = request["schema"]
        invalid, skipped = [], 0
        for text in request["outputs"]:
            try:
                instance = json.loads(text, object_pairs_hook=pairs)
            except KeyError:
                skipped += 1
                continue
            except ValueError as e:
                invalid.append(f"{text[:200]}: {e}")
                continue
            try:
                validator = jsonschema.validators.validator_for(schema)
                error = next(iter(validator(schema).iter_errors(instance)), None)
            except Exception:
                skipped += 1
                continue
            if error is not None:
                invalid.append(f"{text[:300]}: {error.message[:200]}")
        print(json.dumps({"invalid": invalid, "skipped": skipped}), flush=True)


main()
