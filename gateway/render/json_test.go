package render

import (
	"errors"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/render/jinja"
)

func renderString(src string, kwargs map[string]jinja.Value) (string, error) {
	tmpl, err := jinja.Parse(src)
	if err != nil {
		return "", err
	}
	return tmpl.Render(jinja.Input{Kwargs: kwargs})
}

func TestFromJSON(t *testing.T) {
	v, err := fromJSON([]byte(`{"b":1,"a":[null,true,1.5,"é\u00e9\ud83d\ude00"],"b":2,"n":123456789012345678901234567890,"e":1e400}`))
	if err != nil {
		t.Fatal(err)
	}
	got, err := renderString("{{ v | tojson }}", map[string]jinja.Value{"v": v})
	want := `{"b": 2, "a": [null, true, 1.5, "éé😀"], "n": 123456789012345678901234567890, "e": Infinity}`
	if err != nil || got != want {
		t.Errorf("got %s, %v\nwant %s", got, err, want)
	}
	for _, bad := range []string{"", "{", "[1,]", "{\"a\"}", "nul", "1 2", strings.Repeat("[", 1000) + strings.Repeat("]", 1000)} {
		if v, err := fromJSON([]byte(bad)); !errors.Is(err, jinja.ErrInput) {
			t.Errorf("%.20q: gave %v and error %v, want %v", bad, v, err, jinja.ErrInput)
		}
	}
}

func FuzzFromJSON(f *testing.F) {
	f.Add([]byte(`{"a":[1,2.5,"x",null,true,{"b":{}}]}`))
	f.Add([]byte(`-0`))
	f.Add([]byte(`"\ud800"`))
	f.Fuzz(func(t *testing.T, data []byte) {
		v, err := fromJSON(data)
		if err != nil {
			return
		}
		out, err := renderString("{{ v | tojson }}", map[string]jinja.Value{"v": v})
		if err != nil {
			if errors.Is(err, jinja.ErrLimit) {
				return
			}
			t.Fatal(err)
		}
		again, err := fromJSON([]byte(out))
		if err != nil {
			if strings.Contains(out, "Infinity") {
				return
			}
			t.Fatalf("%s: %v", out, err)
		}
		if twice, err := renderString("{{ v | tojson }}", map[string]jinja.Value{"v": again}); err != nil || twice != out {
			t.Fatalf("first %s, then %s, %v", out, twice, err)
		}
	})
}
