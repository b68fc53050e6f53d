package gateway

import (
	"bytes"
	"encoding/json"
	"fmt"
	"html/template"
	"maps"
	"slices"
	"strings"

	"github.com/valyala/fasthttp"
)

// page is the API's description for people. It is made once, from the same document
// that programs get, and needs nothing from elsewhere: neither scripts nor fonts.
var page = template.Must(template.New("docs").Parse(`<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{{.Title}}</title>
<style>body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}code{font-size:.95em}
table{border-collapse:collapse;margin:.5rem 0 1rem}td,th{border-top:1px solid #8886;padding:.25rem .75rem .25rem 0;text-align:left;vertical-align:top}
summary{cursor:pointer;padding:.3rem 0}.m{display:inline-block;font-weight:600;min-width:4.5rem}@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}a{color:#8bf}}</style></head>
<body><h1>{{.Title}} {{.Version}}</h1><p>{{.About}} As a document for programs: <a href="openapi.json">openapi.json</a>.</p>
{{range .Operations}}<details><summary><span class="m">{{.Method}}</span> <code>{{.Path}}</code> {{.Summary}}</summary>
{{with .Fields}}<table><tr><th>field</th><th>type</th><th></th></tr>{{range .}}<tr><td><code>{{.Name}}</code>{{if .Required}} *{{end}}</td><td>{{.Type}}</td><td>{{.About}}</td></tr>{{end}}</table>{{end}}
<p>Answers: {{.Answers}}.{{if .Key}} Asks for a key where there are keys.{{end}}</p></details>
{{end}}</body></html>
`))

type (
	pageData struct {
		Title, Version, About string
		Operations            []pageOperation
	}
	pageOperation struct {
		Method, Path, Summary, Answers string
		Key                            bool
		Fields                         []pageField
	}
	pageField struct {
		Name, Type, About string
		Required          bool
	}
)

// openDocument is of an OpenAPI document what the page tells.
type openDocument struct {
	Info  struct{ Title, Version, Description string }
	Paths map[string]map[string]struct {
		Summary     string
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
	Type                       any
	Description                string
	Enum                       []any
	Minimum, Maximum, MaxItems any
	Required                   []string
	Properties                 map[string]openSchema
}

// describe is a schema's type and range in words.
func (s *openSchema) describe() string {
	var words []string
	switch t := s.Type.(type) {
	case string:
		words = append(words, t)
	case []any:
		for i, x := range t {
			if i > 0 {
				words = append(words, "or")
			}
			words = append(words, fmt.Sprint(x))
		}
	}
	if s.Minimum != nil {
		words = append(words, fmt.Sprintf("≥ %v", s.Minimum))
	}
	if s.Maximum != nil {
		words = append(words, fmt.Sprintf("≤ %v", s.Maximum))
	}
	if s.MaxItems != nil {
		words = append(words, fmt.Sprintf("of at most %v", s.MaxItems))
	}
	if len(s.Enum) > 0 {
		words = append(words, strings.Trim(fmt.Sprintf("one of %v", s.Enum), "[]"))
	}
	return strings.Join(words, " ")
}

// docsPage makes the page of a document.
func docsPage(document []byte) []byte {
	var d openDocument
	if err := json.Unmarshal(document, &d); err != nil {
		panic(err) // it is our own
	}
	p := pageData{Title: d.Info.Title, Version: d.Info.Version, About: d.Info.Description}
	for _, path := range slices.Sorted(maps.Keys(d.Paths)) {
		for _, method := range slices.Sorted(maps.Keys(d.Paths[path])) {
			op := d.Paths[path][method]
			o := pageOperation{Method: strings.ToUpper(method), Path: path, Summary: op.Summary, Key: len(op.Security) > 0,
				Answers: strings.Join(slices.Sorted(maps.Keys(op.Responses)), ", ")}
			if body, ok := op.RequestBody.Content["application/json"]; ok {
				schema := d.Components.Schemas[body.Schema.Ref[strings.LastIndexByte(body.Schema.Ref, '/')+1:]]
				for _, name := range slices.Sorted(maps.Keys(schema.Properties)) {
					f := schema.Properties[name]
					o.Fields = append(o.Fields, pageField{name, f.describe(), f.Description, slices.Contains(schema.Required, name)})
				}
			}
			p.Operations = append(p.Operations, o)
		}
	}
	var out bytes.Buffer
	if err := page.Execute(&out, p); err != nil {
		panic(err)
	}
	return out.Bytes()
}

// docs answers with the page.
func (g *Gateway) docs(ctx *fasthttp.RequestCtx) {
	ctx.SetContentType("text/html; charset=utf-8")
	ctx.Response.Header.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
	ctx.Response.SetBodyRaw(g.docsPage())
}
