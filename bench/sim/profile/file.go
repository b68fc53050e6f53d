package profile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-serving/tandem/internal/regular"
)

// maxFile bounds a profile file in bytes.
const maxFile = 1 << 20

// Load returns the profile of a file, or an estimate by its name, such as h200:llama-8b.
func Load(name string) (*Profile, error) {
	if p, known, err := Named(name); known || err != nil {
		return p, err
	}
	data, err := regular.ReadFile(name, maxFile)
	if err != nil {
		return nil, fmt.Errorf("%w: %w; give a file, or an estimate by its name such as h200:llama-8b", ErrProfile, err)
	}
	p, err := Read(bytes.NewReader(data))
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %s", ErrProfile, name, strings.TrimPrefix(err.Error(), ErrProfile.Error()+": "))
	}
	return p, nil
}

// Read reads a profile. Unknown keys are errors.
func Read(r io.Reader) (*Profile, error) {
	d := yaml.NewDecoder(r)
	d.KnownFields(true)
	p := new(Profile)
	if err := d.Decode(p); err != nil {
		return nil, sentence(err)
	}
	if err := d.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%w: there is more than one YAML document: leave the first", ErrProfile)
	}
	return p, p.Check()
}

// Write writes the profile as YAML.
func (p *Profile) Write(w io.Writer) error {
	e := yaml.NewEncoder(w)
	e.SetIndent(2)
	return errors.Join(e.Encode(p), e.Close())
}

var (
	unknownKey = regexp.MustCompile(`^line (\d+): field (.*) not found in type `)
	wrongType  = regexp.MustCompile(`(?s)^line (\d+): cannot unmarshal (.*) into (.*)$`)
)

// sentence returns a decoder's error as one sentence with the line and the remedy.
func sentence(err error) error {
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	var typed *yaml.TypeError
	if errors.As(err, &typed) && len(typed.Errors) > 0 {
		text = typed.Errors[0]
		if m := unknownKey.FindStringSubmatch(text); m != nil {
			return fmt.Errorf("%w: line %s: the key %s is not known: correct its spelling or place, or remove it", ErrProfile, m[1], m[2])
		}
		if m := wrongType.FindStringSubmatch(text); m != nil {
			value, kind := strings.ReplaceAll(m[2], "\n", " "), m[3]
			switch {
			case kind == "int" || kind == "float64":
				kind = "a number"
			case strings.HasPrefix(kind, "[]"):
				kind = "a list of numbers"
			case strings.HasPrefix(kind, "profile."):
				kind = "a mapping such as {name: h200, tp: 1}"
			}
			return fmt.Errorf("%w: line %s: %s is of the wrong type: write %s", ErrProfile, m[1], value, kind)
		}
	}
	if errors.Is(err, io.EOF) {
		text = "the file is empty"
	}
	return fmt.Errorf("%w: %s: write YAML as `tandem sim --profile h200:llama-8b --print-profile` does", ErrProfile, strings.ReplaceAll(text, "\n", " "))
}
