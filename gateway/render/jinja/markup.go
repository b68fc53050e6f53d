package jinja

import (
	"slices"
	"strings"
)

// markup is markupsafe's Markup, the result of the filter safe: a string that
// escapes what is added to it with + and stays markup through its methods.
// Printing or joining it otherwise treats it as a plain string.
type markup string

var htmlEscapes = strings.NewReplacer("&", "&amp;", ">", "&gt;", "<", "&lt;", "'", "&#39;", `"`, "&#34;")

// plain returns v, markup as a plain string.
func plain(v Value) Value {
	if m, ok := v.(markup); ok {
		return string(m)
	}
	return v
}

// hasMarkup reports whether one of vs is markup.
func hasMarkup(vs ...Value) bool {
	return slices.ContainsFunc(vs, func(v Value) bool { _, ok := v.(markup); return ok })
}

// plainAll is plain of each value, in a copy where one is markup.
func plainAll(vs []Value) []Value {
	if !hasMarkup(vs...) {
		return vs
	}
	return mapped(vs, plain)
}

// escape is markupsafe.escape.
func (r *run) escape(v Value) markup {
	if m, ok := v.(markup); ok {
		return m
	}
	s := r.str(v)
	r.scans(s)
	s = htmlEscapes.Replace(s)
	r.fits(len(s))
	return markup(s)
}

// remark returns v, its strings as markup.
func remark(v Value) Value {
	switch v := v.(type) {
	case string:
		return markup(v)
	case List:
		return List(mapped(v, remark))
	}
	return v
}
