package test

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"sigs.k8s.io/yaml"

	"github.com/tandem-serving/tandem/deploy/test/crds"
)

var (
	schemasMu sync.Mutex
	schemas   = map[string]*jsonschema.Schema{} // by version and kind
)

// validate checks an object of another project by its definition.
func validate(o *object) error {
	schemasMu.Lock()
	defer schemasMu.Unlock()
	id := o.APIVersion + "/" + o.Kind
	if schemas[id] == nil {
		s, err := schemaOf(o)
		if err != nil {
			return fmt.Errorf("definition of %s: %w", id, err)
		}
		schemas[id] = s
	}
	var value any
	if err := yaml.Unmarshal(o.text, &value); err != nil {
		return err
	}
	return schemas[id].Validate(value)
}

// schemaOf reads the schema of an object's kind and version.
func schemaOf(o *object) (*jsonschema.Schema, error) {
	file, err := crds.File(o.Kind)
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var crd struct {
		Spec struct {
			Group    string
			Versions []struct {
				Name   string
				Served bool
				Schema struct{ OpenAPIV3Schema map[string]any }
			}
		}
	}
	if err := yaml.Unmarshal(text, &crd); err != nil {
		return nil, err
	}
	for _, v := range crd.Spec.Versions {
		if crd.Spec.Group+"/"+v.Name != o.APIVersion || !v.Served {
			continue
		}
		root := v.Schema.OpenAPIV3Schema
		closeObjects(root)
		root["properties"].(map[string]any)["metadata"] = map[string]any{"type": "object"}
		c := jsonschema.NewCompiler()
		if err := c.AddResource("crd.json", root); err != nil {
			return nil, err
		}
		return c.Compile("crd.json")
	}
	return nil, fmt.Errorf("%s has no version %s", file, o.APIVersion)
}

// closeObjects makes a schema of Kubernetes one that refuses unknown fields, as strict validation does.
func closeObjects(schema map[string]any) {
	if schema["nullable"] == true {
		if kind, ok := schema["type"].(string); ok {
			schema["type"] = []any{kind, "null"}
		}
	}
	if schema["x-kubernetes-int-or-string"] == true {
		delete(schema, "pattern") // which holds for strings only
	}
	properties, _ := schema["properties"].(map[string]any)
	if _, open := schema["additionalProperties"]; properties != nil && !open && schema["x-kubernetes-preserve-unknown-fields"] != true {
		schema["additionalProperties"] = false
	}
	for _, p := range slices.Sorted(maps.Keys(properties)) {
		if s, ok := properties[p].(map[string]any); ok {
			closeObjects(s)
		}
	}
	for _, key := range []string{"items", "additionalProperties"} {
		if s, ok := schema[key].(map[string]any); ok {
			closeObjects(s)
		}
	}
}
