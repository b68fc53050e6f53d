"""dspy."""

from typing import Literal

import check

import dspy
import litellm

check.client(
    "dspy", "dspy", 'dspy.LM("hosted_vllm/MODEL", api_base="http://HOST:8000/v1", api_key=KEY, engine="litellm")',
    configs={"Predict": 'dspy.configure(adapter=dspy.JSONAdapter()); litellm.register_model({"hosted_vllm/MODEL": {"supports_response_schema": True, "litellm_provider": "hosted_vllm", "mode": "chat"}})'},
)


class Describe(dspy.Signature):
    """Describe the pet."""

    question: str = dspy.InputField()
    animal: Literal["cat", "bird", "dragon"] = dspy.OutputField()
    tame: bool = dspy.OutputField()


@check.structured("Predict", "whole", "schema")
def predict(server):
    known = {"supports_response_schema": True, "litellm_provider": "hosted_vllm", "mode": "chat"}
    litellm.register_model({"hosted_vllm/" + server.model: known})
    lm = dspy.LM("hosted_vllm/" + server.model, api_base=server.base, api_key=server.key, engine="litellm", cache=False, max_tokens=400, num_retries=0)
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        r = dspy.Predict(Describe)(question="Which pet?")
    assert r.animal in ("cat", "bird", "dragon") and isinstance(r.tame, bool), r


check.run()
