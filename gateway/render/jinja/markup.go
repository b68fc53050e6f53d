package jinja

import "strings"

// markup is markupsafe's Markup, what the filter safe returns: a string that
// escapes what is added to it with + and stays markup through its methods.
// Anything that prints or joins it otherwise sees a plain string.
type markup string

var htmlEscapes = strings.NewReplacer("&", "&amp;", ">", "&gt;", "<", "&lt;", "'", "&#39;", `"`, "&#34;")

// plain returns v, markup as a plain string.
func plain(v Value) Value {
	if m, ok := v.(markup); ok {
		return string(m)
	}
	return v
}

func plainAll(vs []Value) []Value {
	for i, v := range vs {
		if m, ok := v.(markup); ok {
			out := append([]Value(nil), vs...)
			out[i] = string(m)
			return plainAll(out)
		}
	}
	return vs
}

// escape is markupsafe.escape.
func (r *run) escape(v Value) markup {
	if m, ok := v.(markup); ok {
		return m
	}
	s := r.str(v)
	if !r.scans(s) {
		return ""
	}
	s = htmlEscapes.Replace(s)
	r.fits(len(s))
	return markup(s)
}

// joinMarkup is + where one side is markup; ok is false for a TypeError.
func (r *run) joinMarkup(a, b Value) (Value, bool) {
	for _, v := range []Value{a, b} {
		switch v.(type) {
		case string, markup:
		default:
			return nil, false
		}
	}
	x, y := r.escape(a), r.escape(b)
	if !r.fits(len(x) + len(y)) {
		return nil, true
	}
	return x + y, true
}

// remark turns the strings in what a method of markup returned into markup.
func remark(v Value) Value {
	switch v := v.(type) {
	case string:
		return markup(v)
	case List:
		out := make(List, len(v))
		for i, e := range v {
			out[i] = remark(e)
		}
		return out
	}
	return v
}

// markupMethods are str's methods whose arguments markup does not escape.
var markupMethods = names(`capitalize count endswith find index isalnum isalpha isdigit islower isspace isupper lower lstrip
	rfind rindex rsplit rstrip split splitlines startswith strip title upper`)

// markupMethod returns a method of markup.
func markupMethod(m markup, name string) (Value, bool) {
	def := strMethods[name]
	if def == nil || !markupMethods[name] {
		if def != nil || otherStrMethods[name] || name == "striptags" || name == "unescape" {
			return method{m, name, nil}, true
		}
		return nil, false
	}
	return method{m, name, &methodDef{params: def.params, required: def.required, call: func(r *run, recv Value, p []Value) Value {
		return remark(def.call(r, plain(recv), p))
	}}}, true
}
