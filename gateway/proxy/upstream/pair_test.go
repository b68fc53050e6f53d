package upstream

import "testing"

func TestLegs(t *testing.T) {
	n := int64(0)
	room := func() int64 { n++; return n }
	const chat = `{"model":"m", "max_tokens":50,"stream" : true,"stream_options":{"a":1}, "x":[1, 2]}`
	if got := string(PrefillRequest(nil, []byte(chat))); got != `{"model":"m","x":[1, 2],"max_tokens":1,"min_tokens":1,"stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}` {
		t.Error(got)
	}
	if got := string(DecodeRequest(nil, []byte(`{"a":1}`), []byte(`{"b": 2}`))); got != `{"a":1,"kv_transfer_params":{"b": 2}}` {
		t.Error(got)
	}
	if got := string(DecodeRequest(nil, []byte(`{"a":1,"kv_transfer_params":{}}`), nil)); got != `{"a":1}` {
		t.Error(got)
	}
	for body, want := range map[string]string{
		`{}`:                                  `{"bootstrap_host":"h","bootstrap_port":7,"bootstrap_room":1}`,
		`{"prompt":["a","b\"],"]}`:            `{"prompt":["a","b\"],"],"bootstrap_host":["h","h"],"bootstrap_port":[7,7],"bootstrap_room":[1,2]}`,
		`{"prompt":[[1,2],[3],[4]]}`:          `{"prompt":[[1,2],[3],[4]],"bootstrap_host":["h","h","h"],"bootstrap_port":[7,7,7],"bootstrap_room":[1,2,3]}`,
		`{"prompt":[1,2,3]}`:                  `{"prompt":[1,2,3],"bootstrap_host":"h","bootstrap_port":7,"bootstrap_room":1}`,
		`{"prompt":["a"],"bootstrap_room":9}`: `{"prompt":["a"],"bootstrap_host":"h","bootstrap_port":7,"bootstrap_room":1}`,
	} {
		n = 0
		look, err := ParseEnvelope([]byte(body))
		if err != nil {
			t.Fatal(err)
		}
		if got := string(BootstrapRequest(nil, []byte(body), &look, "h", 7, room)); got != want {
			t.Errorf("%s: %s", body, got)
		}
	}
	for answer, want := range map[string]string{`{"kv_transfer_params":{"a":[1]}}`: `{"a":[1]}`, `{"kv_transfer_params":null}`: "", `{}`: ""} {
		if got, err := TransferParams([]byte(answer)); err != nil || string(got) != want {
			t.Errorf("%s: %s %v", answer, got, err)
		}
	}
	if _, err := TransferParams([]byte(`{"kv`)); err == nil {
		t.Error("taken")
	}
	if p := bootstrapPort([]byte(`{"x":{"disaggregation_bootstrap_port":1},"disaggregation_bootstrap_port": 8999}`)); p != 8999 {
		t.Error(p)
	}
}
