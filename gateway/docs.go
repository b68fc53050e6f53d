package gateway

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"html/template"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/messages"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/api/responses"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// page is the API's description for people. The gateway makes it once, from the document that
// programs get. The page loads nothing: it has neither scripts nor fonts.
var page = template.Must(template.New("docs").Parse(`<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{{.Title}}</title>
<style>body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}code,pre{font-size:.95em}
pre{background:#8882;padding:.5rem .75rem;white-space:pre-wrap;overflow-wrap:anywhere}.f{margin-left:1rem}
table{border-collapse:collapse;margin:.25rem 0 1rem}td,th{border-top:1px solid #8886;padding:.25rem .75rem .25rem 0;text-align:left;vertical-align:top}
summary{cursor:pointer;padding:.3rem 0}.m{display:inline-block;font-weight:600;min-width:4.5rem}@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}a{color:#8bf}}</style></head>
<body><h1>{{.Title}} {{.Version}}</h1><p>The OpenAI API as this gateway serves it. <a href="openapi.json">openapi.json</a> has the same for programs.</p>
<p>The examples run in a shell after <code>TANDEM=127.0.0.1:8000</code>, with the address of this gateway.{{if .Keys}} They need <code>KEY</code>, an API key.{{end}}
A field that is null counts as absent.</p>
{{range .Groups}}<h2>{{.Name}}</h2>
{{range .Operations}}<details{{if .Open}} open{{end}}><summary><span class="m">{{.Method}}</span> <code>{{.Path}}</code> {{.Summary}}</summary>
<pre>{{.Example}}</pre>{{range .Fields}}
<details class="f"><summary>{{.Name}} ({{len .Rows}})</summary><table><tr><th>field</th><th>values</th><th></th></tr>{{range .Rows}}<tr><td><code>{{.Name}}</code>{{if .Required}} (required){{end}}</td><td>{{.Values}}</td><td>{{.About}}</td></tr>{{end}}</table></details>{{end}}
<p>Statuses: {{.Statuses}}.</p></details>
{{end}}{{end}}</body></html>
`))

type (
	pageData struct {
		Title, Version string
		Keys           bool
		Groups         []pageGroup
	}
	pageGroup struct {
		Name       string
		Operations []pageOperation
	}
	pageOperation struct {
		openai.Operation
		Example, Statuses string
		Open              bool // shown unfolded
		Fields            []pageFields
	}
	// pageFields are a body's fields of one kind.
	pageFields struct {
		Name string
		Rows []pageField
	}
	pageField struct {
		Name, Values, About string
		Required            bool
	}
)

// example is a request to a route: the path with its query, and the body. Neither holds a quote
// mark of the shell.
type example struct{ path, body string }

// examples has requests to routes, by method and path. That to another route is its path alone.
var examples = map[string]example{
	"POST /v1/chat/completions":          {"/v1/chat/completions", `{"messages": [{"role": "user", "content": "What is prefill?"}], "stream": true}`},
	"POST /v1/completions":               {"/v1/completions", `{"prompt": "Once upon a time", "max_tokens": 32}`},
	"POST " + openai.TokensPath:          {openai.TokensPath, `{"token_ids": [72, 105], "sampling_params": {"max_tokens": 8}}`},
	"POST " + messages.Path:              {messages.Path, `{"max_tokens": 64, "messages": [{"role": "user", "content": "What is prefill?"}], "stream": true}`},
	"POST " + messages.CountPath:         {messages.CountPath, `{"messages": [{"role": "user", "content": "How many tokens?"}]}`},
	"POST " + responses.Path:             {responses.Path, `{"instructions": "Answer in one sentence.", "input": "What is prefill?", "stream": true}`},
	"GET /v1/models/{model}":             {"/v1/models/tandem-builtin", ""},
	"POST /v1/embeddings":                {"/v1/embeddings", `{"input": ["What is prefill?", "What is decode?"]}`},
	"POST /pooling":                      {"/pooling", `{"input": ["What is prefill?"]}`},
	"POST /v2/embed":                     {"/v2/embed", `{"texts": ["What is prefill?"], "embedding_types": ["float"]}`},
	"POST /score":                        {"/score", `{"text_1": "What is prefill?", "text_2": ["Prefill computes a prompt.", "A dog barks."]}`},
	"POST /v1/score":                     {"/v1/score", `{"text_1": "What is prefill?", "text_2": ["Prefill computes a prompt.", "A dog barks."]}`},
	"POST /rerank":                       {"/rerank", `{"query": "What is prefill?", "documents": ["A dog barks.", "Prefill computes a prompt."]}`},
	"POST /v1/rerank":                    {"/v1/rerank", `{"query": "What is prefill?", "documents": ["A dog barks.", "Prefill computes a prompt."]}`},
	"POST /v2/rerank":                    {"/v2/rerank", `{"query": "What is prefill?", "documents": ["A dog barks.", "Prefill computes a prompt."]}`},
	"POST /tokenize":                     {"/tokenize", `{"prompt": "How many tokens?", "return_token_strs": true}`},
	"POST /detokenize":                   {"/detokenize", `{"tokens": [72, 105]}`},
	"POST /v1/chat/completions/render":   {"/v1/chat/completions/render", `{"messages": [{"role": "user", "content": "What is prefill?"}]}`},
	"POST /v1/completions/render":        {"/v1/completions/render", `{"prompt": "Once upon a time", "max_tokens": 32}`},
	"POST /v1/chat/completions/derender": {"/v1/chat/completions/derender", `{"generate_response": {"choices": [{"token_ids": [72, 105]}]}}`},
	"POST /v1/completions/derender":      {"/v1/completions/derender", `{"generate_responses": [{"choices": [{"token_ids": [72, 105]}]}]}`},
	"GET /v1/responses/{response}":       {"/v1/responses/resp_1", ""},
	"DELETE /v1/responses/{response}":    {"/v1/responses/resp_1", ""},
	"POST /v1/responses/{response}":      {"/v1/responses/resp_1/cancel", ""},
	"POST " + openai.BatchPath:           {openai.BatchPath, `{"messages": [[{"role": "user", "content": "What is prefill?"}], [{"role": "user", "content": "What is decode?"}]]}`},
	"POST " + openai.InvocationsPath:     {openai.InvocationsPath, `{"prompt": "Once upon a time", "max_tokens": 32}`},
	"POST " + openai.AbortPath:           {openai.AbortPath, `{"request_ids": ["chatcmpl-1"]}`},
	"PUT " + metrics.LevelPath:           {metrics.LevelPath, "debug"},
	"POST /admin/drain/{node}":           {"/admin/drain/d1?timeout=30s", ""},
	"DELETE /admin/drain/{node}":         {"/admin/drain/d1", ""},
	"POST " + openai.LoadAdapterPath:     {openai.LoadAdapterPath, `{"lora_name": "sql", "lora_path": "/srv/sql-adapter"}`},
	"POST " + openai.UnloadAdapterPath:   {openai.UnloadAdapterPath, `{"lora_name": "sql"}`},
	"GET /admin/record":                  {"/admin/record?session=7f3a", ""},
	"GET /debug/route":                   {"/debug/route?prompt=What+is+prefill", ""},
}

// toolExample is a second request to chats, for models that call tools.
var toolExample = example{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "Is it raining in Oslo?"}], "tools": [{"type": "function", ` +
	`"function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]}`}

func exampleOf(r *endpoint) example {
	return cmp.Or(examples[r.Method+" "+r.Path], example{path: r.Path})
}

// curl returns the example as a command line. keys is whether the route needs an API key.
func (e *example) curl(method string, keys bool) string {
	b := []byte("curl -s")
	if strings.Contains(e.body, `"stream": true`) {
		b = append(b, 'N')
	}
	if method != "GET" && (method != "POST" || e.body == "") {
		b = append(b, " -X "+method...)
	}
	b = append(b, ` "$TANDEM`+e.path+`"`...)
	if keys {
		b = append(b, ` -H "Authorization: Bearer $KEY"`...)
	}
	if e.body != "" {
		if e.body[0] == '{' {
			b = append(b, ` -H "Content-Type: application/json"`...)
		}
		b = append(b, ` -d '`+e.body+`'`...)
	}
	return string(b)
}

// openDocument is the part of an OpenAPI document that the page shows.
type openDocument struct {
	Info  struct{ Title, Version string }
	Paths map[string]map[string]struct {
		RequestBody struct {
			Content map[string]struct {
				Schema struct {
					Ref string `json:"$ref"`
				}
			}
		}
		Responses map[string]struct{ Description string }
		Security  []any
	}
	Components struct{ Schemas map[string]openSchema }
}

type openSchema struct {
	Type                    any
	Description             string
	AnyOf                   []openSchema
	Enum                    []any
	Const                   any
	Minimum, Maximum        *float64
	ExclusiveMinimum        *float64
	MaxItems, MaxProperties *float64
	Required                []string
	Properties              map[string]openSchema
}

// describe returns a schema's types, range and values in words. It leaves out null, which every
// field takes, unless nothing else is possible.
func (s *openSchema) describe() string {
	var words []string
	for i := range s.AnyOf {
		if d := s.AnyOf[i].describe(); d != "" && d != "null" {
			words = append(words, d)
		}
	}
	if len(words) > 0 {
		return strings.Join(words, " or ")
	}
	switch t := s.Type.(type) {
	case string:
		words = append(words, t)
	case []any:
		for _, x := range t {
			if x != "null" {
				words = append(words, fmt.Sprint(x))
			}
		}
		words = []string{strings.Join(words, " or ")}
	}
	if s.MaxProperties != nil && *s.MaxProperties == 0 {
		return "{}"
	}
	if s.Const != nil {
		words = append(words, literal(s.Const))
	}
	if s.Minimum != nil && *s.Minimum > -math.MaxInt32 {
		words = append(words, fmt.Sprintf("≥ %.10g", *s.Minimum))
	}
	if s.ExclusiveMinimum != nil {
		words = append(words, fmt.Sprintf("> %.10g", *s.ExclusiveMinimum))
	}
	if s.Maximum != nil && *s.Maximum < math.MaxInt32 {
		words = append(words, fmt.Sprintf("≤ %.10g", *s.Maximum))
	}
	if s.MaxItems != nil {
		words = append(words, fmt.Sprintf("of at most %.10g", *s.MaxItems))
	}
	var values []string
	for _, v := range s.Enum {
		values = append(values, literal(v))
	}
	if len(values) > 0 {
		words = append(words, strings.Join(values, " or "))
	}
	return strings.Join(words, " ")
}

// literal returns a value as JSON.
func literal(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // it was decoded from JSON
	}
	return string(text)
}

// Fields are listed by what the gateway does with them. A description in the document begins with
// one of these words.
const (
	withoutEffect = "accepted without effect"
	notSupported  = "not supported"
)

// commonFields come first in their table, in this order.
var commonFields = []string{"messages", "prompt", "input", "model", "stream", "max_completion_tokens", "max_tokens", "temperature", "seed"}

// pageFieldsOf returns the fields of a request's schema, by kind.
func pageFieldsOf(schema *openSchema) []pageFields {
	kinds := []pageFields{
		{Name: "Fields"},
		{Name: "Fields without effect"},
		{Name: "Refused with status 400, except with these values"},
	}
	names := slices.Sorted(maps.Keys(schema.Properties))
	slices.SortStableFunc(names, func(a, b string) int { return rankOf(a) - rankOf(b) })
	for _, name := range names {
		p := schema.Properties[name]
		f := pageField{name, p.describe(), p.Description, slices.Contains(schema.Required, name)}
		kind := 0
		if about, ok := strings.CutPrefix(p.Description, withoutEffect); ok {
			kind, f.About = 1, strings.TrimPrefix(about, ": ")
		} else if about, ok := strings.CutPrefix(p.Description, notSupported); ok {
			kind, f.About = 2, strings.TrimPrefix(about, ": ")
		} else if f.About == "served" {
			f.About = ""
		}
		kinds[kind].Rows = append(kinds[kind].Rows, f)
	}
	return slices.DeleteFunc(kinds, func(k pageFields) bool { return len(k.Rows) == 0 })
}

// rankOf returns a field's place in its table. Fields of equal rank are in alphabetical order.
func rankOf(name string) int {
	if i := slices.Index(commonFields, name); i >= 0 {
		return i
	}
	return len(commonFields)
}

// docsPage returns the page of a document, in the order of the table of routes.
func docsPage(document []byte) []byte {
	var d openDocument
	if err := json.Unmarshal(document, &d); err != nil {
		panic(err) // the gateway made the document
	}
	p := pageData{Title: d.Info.Title, Version: d.Info.Version, Groups: []pageGroup{
		{Name: "Use"}, {Name: "Health"}, {Name: "Operate"},
	}}
	for i := range routes {
		r := &routes[i]
		op := d.Paths[r.Path][strings.ToLower(r.Method)]
		keys := len(op.Security) > 0
		p.Keys = p.Keys || keys
		e := exampleOf(r)
		o := pageOperation{Operation: r.Operation, Open: i == 0,
			Example: e.curl(r.Method, keys), Statuses: strings.Join(slices.Sorted(maps.Keys(op.Responses)), ", ")}
		if i == 0 { // chat completions
			o.Example += "\n\n" + toolExample.curl(r.Method, keys)
		}
		if body, ok := op.RequestBody.Content["application/json"]; ok {
			schema := d.Components.Schemas[body.Schema.Ref[strings.LastIndexByte(body.Schema.Ref, '/')+1:]]
			o.Fields = pageFieldsOf(&schema)
		}
		group := 0
		switch r.who {
		case anyone:
			group = 1
		case operators, overseers:
			group = 2
		}
		p.Groups[group].Operations = append(p.Groups[group].Operations, o)
	}
	var out bytes.Buffer
	if err := page.Execute(&out, p); err != nil {
		panic(err)
	}
	return out.Bytes()
}

// docs serves the page.
func (g *Gateway) docs(ctx *fasthttp.RequestCtx) {
	ctx.SetContentType("text/html; charset=utf-8")
	ctx.Response.Header.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
	ctx.Response.SetBodyRaw(g.docsPage())
}
