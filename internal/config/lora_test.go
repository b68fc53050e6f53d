package config

import (
	"strings"
	"testing"
)

func TestLoRAModules(t *testing.T) {
	for given, want := range map[string]string{
		"": "", "a=/x": "a=/x", "a=/x,b=y=z": "a=/x,b=y=z",
		`{"name":"a","path":"/x","base_model_name":"m"}`:          "a=/x",
		`[{"name":"a","path":"/x"}, {"name": "b", "path": "/x"}]`: "a=/x,b=/x",
	} {
		var got LoRAModules
		if err := got.Set(given); err != nil || got.String() != want {
			t.Errorf("%s: %s, %v, want %s", given, got.String(), err, want)
		}
	}
	for given, says := range map[string]string{
		"a": "NAME=FOLDER", "=/x": "NAME=FOLDER", `{"name":"a"}`: "NAME=FOLDER",
		`{"name":"a","path":"/x","rank":8}`: "rank", "a=/x,a=/y": "twice",
	} {
		var got LoRAModules
		if err := got.Set(given); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", given, err, says)
		}
	}
}

// The flags as vllm serve takes them.
func TestLoRAFlags(t *testing.T) {
	for args, want := range map[string]int{
		"": 0, "--enable-lora": 1, "--enable-lora --max-loras 3": 3, "--enable-lora --max-loras 2 --max-cpu-loras 5": 5,
		"--enable-lora --lora-modules a=/x b=/y c=/z --port 1":                              3,
		"--enable-lora --lora-modules a=/x --lora_modules {\"name\":\"b\",\"path\":\"/y\"}": 2,
	} {
		var l LoRA
		s := New("serve", "", "", nil)
		s.ForNodes()
		l.Register(s)
		s.Int("port", 0, "")
		if err := s.Resolve(strings.Fields(args), nil); err != nil || s.NArg() > 0 {
			t.Errorf("%s: %v, %q", args, err, s.Args())
			continue
		}
		if n, err := l.Places(); err != nil || n != want {
			t.Errorf("%s: %d places, %v, want %d", args, n, err, want)
		}
	}
	for _, l := range []LoRA{{Modules: LoRAModules{{"a", "/x"}}}, {Enable: true, Max: 4, MaxLoaded: 2}} {
		if _, err := l.Places(); err == nil {
			t.Errorf("%+v is taken", l)
		}
	}
}
