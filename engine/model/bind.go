package model

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/safetensors"
)

// binding is one weight of a model struct: where it goes, what it is called and
// what shape it must have.
type binding struct {
	target *backend.Weight
	name   string
	shape  []int  // of the checkpoint
	parts  []part // of shape's dimensions, what is loaded
	out    string // the name of shape's first dimension

	rows []int   // of the tensor, in the order in which they are loaded; nil: those of parts[0]
	plus float32 // is added to each number
}

// in is the part of a matrix's inputs, one place of a vector's.
func (b *binding) in() part {
	switch len(b.parts) {
	case 1:
		return whole(1)
	case 3: // a convolution of each column, loaded as a vector
		return whole(b.parts[1].n * b.parts[2].n)
	}
	return b.parts[1]
}

// bindings walks a struct of weights. A backend.Weight field has two tags: hf, its Hugging Face
// name below the struct's prefix, and shape, its dimensions by their names in dims, which has the
// part of each that is loaded. A struct, or a pointer to one, has only the tag hf, the prefix of
// its names. A nil pointer binds nothing, and an embedded struct needs no tag. A slice of structs
// is one struct for each layer or expert, named hf.0., hf.1., …
func bindings(weights any, prefix string, dims map[string]part) []binding {
	return bindStruct(reflect.ValueOf(weights).Elem(), prefix, dims)
}

func bindStruct(v reflect.Value, prefix string, dims map[string]part) []binding {
	var out []binding
	for i := range v.NumField() {
		tag := v.Type().Field(i).Tag
		name, ok := tag.Lookup("hf")
		if !ok && !v.Type().Field(i).Anonymous {
			continue
		}
		field := v.Field(i)
		if field.Kind() == reflect.Pointer {
			if field.IsNil() {
				continue
			}
			field = field.Elem()
		}
		if field.Kind() == reflect.Struct {
			if name != "" {
				name += "."
			}
			out = append(out, bindStruct(field, prefix+name, dims)...)
			continue
		}
		if field.Kind() == reflect.Slice {
			for n := range field.Len() {
				out = append(out, bindStruct(field.Index(n), fmt.Sprintf("%s%s.%d.", prefix, name, n), dims)...)
			}
			continue
		}
		b := binding{target: field.Addr().Interface().(*backend.Weight), name: prefix + name}
		for i, dim := range strings.Split(tag.Get("shape"), ",") {
			if i == 0 {
				b.out = dim
			}
			size, ok := dims[dim]
			if !ok {
				panic(fmt.Sprintf("model: %s: no dimension is called %q", b.name, dim))
			}
			b.shape, b.parts = append(b.shape, size.of), append(b.parts, size)
		}
		out = append(out, b)
	}
	return out
}

// match finds the tensor of every binding, and nothing else in the file but
// what ignore allows. It reports all that is wrong at once, up to a bound.
func match(all []binding, stacked []stack, c *safetensors.Checkpoint, config *Config, ignore func(name string) bool) ([]stored, error) {
	var tensors []stored
	var faults []string
	expected := map[string]bool{}
	for _, b := range all {
		expected[b.name] = true
		t, fault := find(c, b.name, config)
		if fault != "" {
			faults = append(faults, fault)
			continue
		}
		if !slices.Equal(t.Shape, b.shape) {
			faults = append(faults, fmt.Sprintf("%s: want shape %v, got %v", b.name, b.shape, t.Shape))
			continue
		}
		if !readable(t.DType) {
			faults = append(faults, fmt.Sprintf("%s: dtype %s; supported: F32, BF16, F16, F8_E4M3", b.name, t.DType))
			continue
		}
		tensors = append(tensors, t)
	}
	for i := range stacked {
		for _, name := range stacked[i].names {
			expected[name] = true
			t, fault := find(c, name, config)
			if fault != "" {
				faults = append(faults, fault)
				continue
			}
			stacked[i].tensors = append(stacked[i].tensors, t.Tensor)
			stacked[i].from = &t
		}
		if len(stacked[i].tensors) == len(stacked[i].names) {
			if fault := stacked[i].fault(); fault != "" {
				faults = append(faults, fault)
			}
		}
	}
	quantized, gptq := config.FP8 != nil || config.Integers != nil, config.Integers != nil && config.Integers.Method == "gptq"
	for _, name := range c.Names() {
		if !expected[name] && !ignore(name) && !scaleOfKV(name) && !(quantized && scaleOf(name, expected)) && !(gptq && unusedBias(c, name)) {
			faults = append(faults, fmt.Sprintf("%s is unexpected", name))
		}
	}
	if len(faults) == 0 {
		return tensors, nil
	}
	return nil, fmt.Errorf("%w: %s", ErrWeights, summary(faults))
}

// summary lists some faults and counts the rest.
func summary(faults []string) string {
	const most = 8
	if len(faults) <= most {
		return strings.Join(faults, "; ")
	}
	return fmt.Sprintf("%s; and %d more", strings.Join(faults[:most], "; "), len(faults)-most)
}

// dtypes are the element types that a backend takes, by their file names.
var dtypes = map[string]backend.DType{"F32": backend.F32, "BF16": backend.BF16, "F8_E4M3": backend.FP8}
