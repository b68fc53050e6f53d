package openai

import (
	"encoding/json"
	"reflect"
	"testing"
)

// What a body of tokens has besides its tokens reaches the completion as it is, whichever
// characters it is made of.
func TestCompletionOfTokensIsJSON(t *testing.T) {
	const body = `{"token_ids":[1,2],"cache_salt":"\u0012é\ud83d\ude00\"\\","x\u0003":{"\u0001":["\u001f",1.5e3,true,null,{}]},"sampling_params":{"stop":["\u0007"],"logit_bias":{"5":-1}}}`
	got, fault := CompletionOfTokens([]byte(body))
	if fault != nil {
		t.Fatal(fault)
	}
	var have, want map[string]any
	if err := json.Unmarshal(got, &have); err != nil {
		t.Fatalf("%s: %v", got, err)
	}
	if err := json.Unmarshal([]byte(body), &want); err != nil {
		t.Fatal(err)
	}
	for name, v := range want["sampling_params"].(map[string]any) {
		want[name] = v
	}
	want["prompt"], want["return_token_ids"] = want["token_ids"], true
	delete(want, "token_ids")
	delete(want, "sampling_params")
	if !reflect.DeepEqual(have, want) {
		t.Errorf("got  %v\nwant %v", have, want)
	}
}
