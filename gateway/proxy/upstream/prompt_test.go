package upstream

import (
	"strings"
	"testing"
)

func TestTokens(t *testing.T) {
	long := strings.Repeat("a b ", 20) // 80 bytes
	for prompt, want := range map[string]struct {
		n     int
		exact bool
	}{
		``:                         {},
		`null`:                     {},
		`[]`:                       {},
		`[1,2, 3]`:                 {3, true},
		`[-1.5e+3,20]`:             {2, true},
		` [ [1,2], [1,2,3],[4] ] `: {3, true},
		`"` + long + `"`:           {10, false},
		`["` + long + `","x"]`:     {10, false},
		`["x",[1,2]]`:              {2, true},
		`[{"role":"user","content":"` + long + `"},{"content":"` + long + `"}]`:                                                 {20, false},
		`[{"content":[{"type":"text","text":"` + long + `"},{"type":"image_url","image_url":{"url":"https://` + long + `"}}]}]`: {10, false},
		`[{"content":[{"image":"` + long + `","text":"` + long + `"}]}]`:                                                        {10, false},
		`"data:` + long + `"`:                                                  {10, false},
		`[{"role":"user","content":"data:` + long + `"}]`:                      {10, false},
		`[{"x":"data:` + long + `","content":[{"text":"data:` + long + `"}]}]`: {10, false},
		`"` + strings.Repeat(`\u4e2d`, 40) + `"`:                               {10, false},
		`"` + strings.Repeat(`\n`, 80) + `"`:                                   {10, false},
		`[[1,2`:                                                                {0, false},
		strings.Repeat("[", 1<<20) + strings.Repeat("]", 1<<20):                {0, false}, // in linear time
		`[`:   {0, false},
		`["x`: {0, false},
	} {
		if n, exact := PromptTokens([]byte(prompt)); n != want.n || exact != want.exact {
			t.Errorf("%.60s: %d %v, want %v", prompt, n, exact, want)
		}
	}
}
