package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSpeculation(t *testing.T) {
	for given, want := range map[string]Speculation{
		"":     {},
		"{}":   {},
		"null": {},
		`{"method":"ngram","num_speculative_tokens":4}`:                                                {Tokens: 4, Min: 5, Max: 5},
		`{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":3}`:                          {Tokens: 4, Min: 3, Max: 3},
		`{"model":"[ngram]","num_speculative_tokens":1,"prompt_lookup_min":2}`:                         {Tokens: 1, Min: 2, Max: 2},
		`{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":6,"prompt_lookup_min":null}`: {Tokens: 4, Min: 6, Max: 6},
		`{"method":"draft_model","model":"./small","num_speculative_tokens":3}`:                        {Tokens: 3, Model: "./small"},
		`{"model":"org/draft","num_speculative_tokens":4}`:                                             {Tokens: 4, Model: "org/draft"},
	} {
		var got Speculation
		err := got.Set(given)
		if want.Tokens > 0 {
			want.given = given
		}
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v, want %+v", given, got, err, want)
		}
	}
	for given, says := range map[string]string{
		"ngram": "want a JSON object",
		`{"method":"eagle","num_speculative_tokens":4}`:                                             `"eagle" is not supported; use "ngram" or "draft_model"`,
		`{"method":"draft_model","num_speculative_tokens":4}`:                                       "needs model",
		`{"method":"draft_model","model":"","num_speculative_tokens":4}`:                            "needs model",
		`{"model":"org/draft"}`:                                                                     "at least 1",
		`{"model":"org/draft","num_speculative_tokens":4,"prompt_lookup_max":3}`:                    "need method \"ngram\"",
		`{"method":"ngram"}`:                                                                        "at least 1",
		`{"method":"ngram","num_speculative_tokens":0}`:                                             "at least 1",
		`{"method":"ngram","num_speculative_tokens":1.5}`:                                           "want a JSON object",
		`{"method":"ngram","num_speculative_tokens":2,"prompt_lookup_max":2,"prompt_lookup_min":3}`: "1 <= min <= max",
		`{"method":"ngram","num_speculative_tokens":2,"disable_by_batch_size":3}`:                   "disable_by_batch_size",
		`{"num_speculative_tokens":2} x`:                                                            "want a JSON object",
	} {
		var got Speculation
		if err := got.Set(given); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", given, err, says)
		}
	}
	path := filepath.Join(t.TempDir(), "tandem.yaml")
	if err := os.WriteFile(path, []byte("speculative_config:\n  method: ngram\n  num_speculative_tokens: 3\n  prompt_lookup_max: 4\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := New("serve", "", "", nil)
	s.Var(new(Speculation), "speculative-config", "")
	if err := s.Resolve([]string{"--config", path}, nil); err != nil {
		t.Error(err)
	}
	if got := s.Lookup("speculative-config").Value.(*Speculation); got.Tokens != 3 || got.Max != 4 || got.Min != 4 {
		t.Errorf("of a file: %+v", got)
	}
}
