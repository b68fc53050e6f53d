package config

import (
	"encoding/json"
	"fmt"
	"strings"
)

// LoRA is the settings of low-rank adapters, with vllm serve's flags.
type LoRA struct {
	Enable                  bool
	Max, MaxRank, MaxLoaded int
	Modules                 LoRAModules
	Root                    string // folder of adapters that requests may load; empty: any
}

// Register declares the flags.
func (l *LoRA) Register(s *Set) {
	s.BoolVar(&l.Enable, "enable-lora", false, "serve low-rank adapters (LoRA) of the model")
	s.Var(&l.Modules, "lora-modules", `adapters to load at the start: NAME=FOLDER in PEFT's format, or {"name": …, "path": …}; a list, or repeated`)
	s.StringVar(&l.Root, "lora-root", "", "folder of the adapters that POST /v1/load_lora_adapter may load, and to which paths are relative; default: any folder that the node can read")
	s.CountVar(&l.Max, "max-loras", 1, 1, "most adapters in one step")
	s.CountVar(&l.MaxRank, "max-lora-rank", 16, 1, "largest rank of an adapter; each adapter slot has memory for it")
	s.CountVar(&l.MaxLoaded, "max-cpu-loras", 0, 0, "most adapters loaded at once, all of which may be in one step; 0: --max-loras, or the number of --lora-modules")
}

// Places returns how many adapters may be loaded at once; 0: none. On a CPU, loaded
// adapters need no copy for the computation.
func (l *LoRA) Places() (int, error) {
	if !l.Enable {
		if len(l.Modules) > 0 {
			return 0, fmt.Errorf("%w: --lora-modules needs --enable-lora", ErrValue)
		}
		return 0, nil
	}
	if l.MaxLoaded > 0 && l.MaxLoaded < l.Max {
		return 0, fmt.Errorf("%w: --max-cpu-loras %d is less than --max-loras %d", ErrValue, l.MaxLoaded, l.Max)
	}
	return max(l.Max, l.MaxLoaded, len(l.Modules)), nil
}

// LoRAModules are adapters by name.
type LoRAModules []LoRAModule

// LoRAModule is the name and folder of an adapter.
type LoRAModule struct{ Name, Path string }

// String returns the adapters as NAME=FOLDER, with commas.
func (l *LoRAModules) String() string {
	var all []string
	for _, m := range *l {
		all = append(all, m.Name+"="+m.Path)
	}
	return strings.Join(all, ",")
}

// Type names the value in help texts.
func (l *LoRAModules) Type() string { return jsonType }

// Set adds NAME=FOLDER, several with commas between, or a JSON object or list.
func (l *LoRAModules) Set(v string) error {
	if text := strings.TrimSpace(v); strings.HasPrefix(text, "{") || strings.HasPrefix(text, "[") {
		if text[0] == '{' {
			text = "[" + text + "]"
		}
		var all []struct {
			Name string `json:"name"`
			Path string `json:"path"`
			Base string `json:"base_model_name"`
		}
		d := json.NewDecoder(strings.NewReader(text))
		d.DisallowUnknownFields()
		if err := d.Decode(&all); err != nil || d.More() {
			return fmt.Errorf("%s: want {\"name\": NAME, \"path\": FOLDER}, or a list of such (%v)", v, err)
		}
		for _, m := range all {
			if err := l.add(m.Name, m.Path, v); err != nil {
				return err
			}
		}
		return nil
	}
	if v == "" {
		return nil // as --dry-run prints it
	}
	for _, part := range strings.Split(v, ",") {
		name, path, _ := strings.Cut(part, "=")
		if err := l.add(name, path, v); err != nil {
			return err
		}
	}
	return nil
}

func (l *LoRAModules) add(name, path, given string) error {
	if name == "" || path == "" {
		return fmt.Errorf("%s: want NAME=FOLDER, or {\"name\": NAME, \"path\": FOLDER}", given)
	}
	for _, m := range *l {
		if m.Name == name {
			return fmt.Errorf("%s: %s is given twice", given, name)
		}
	}
	*l = append(*l, LoRAModule{name, path})
	return nil
}
