package tokenizer

import (
	"encoding/json"
	"strings"
	"unicode"
)

func (t *Tokenizer) loadNormalizer(raw json.RawMessage) error {
	if isNull(raw) {
		return nil
	}
	var c component
	if err := decodePart(raw, "normalizer", &c); err != nil {
		return err
	}
	switch c.Type {
	case "NFC":
		return t.addNormalizer(c.Type, nfcGrowth, t.chars.nfc)
	case "Precompiled":
		p, err := readPrecompiled(c.Charsmap)
		if err != nil {
			return err
		}
		return t.addNormalizer(c.Type, max(1, p.longest()), p.apply)
	case "Strip":
		left, right := c.StripLeft == nil || *c.StripLeft, c.StripRight == nil || *c.StripRight
		return t.addNormalizer(c.Type, 1, func(s string) string {
			if left {
				s = strings.TrimLeftFunc(s, unicode.IsSpace)
			}
			if right {
				s = strings.TrimRightFunc(s, unicode.IsSpace)
			}
			return s
		})
	case "Replace":
		f, growth, err := c.replacePattern()
		if err != nil {
			return err
		}
		if f != nil {
			return t.addNormalizer(c.Type, growth, f)
		}
		old, err := c.literal("normalizer.pattern")
		if err != nil {
			return err
		}
		growth = max(1, (len(c.Content)+len(old)-1)/len(old))
		return t.addNormalizer(c.Type, growth, func(s string) string { return strings.ReplaceAll(s, old, c.Content) })
	case "Prepend":
		return t.addNormalizer(c.Type, 1+len(c.Prepend), func(s string) string {
			if s == "" {
				return s
			}
			return c.Prepend + s
		})
	case "Sequence":
		for _, part := range c.Normalizers {
			if err := t.loadNormalizer(part); err != nil {
				return err
			}
		}
		return nil
	}
	return &UnsupportedError{"normalizer", c.Type}
}

// replacePattern returns what a Replace does whose pattern is one of the expressions that
// SentencePiece's handling of spaces is written with, and the bytes that it makes of one, at most.
// f is nil for a pattern that is a text.
func (c *component) replacePattern() (f func(string) string, growth int, err error) {
	var p struct{ Regex *string }
	if err := decodePart(c.Pattern, "normalizer.pattern", &p); err != nil || p.Regex == nil {
		return nil, 0, err
	}
	switch {
	case *p.Regex == ` {2,}`:
		return func(s string) string { return replaceRuns(s, c.Content) }, max(1, (len(c.Content)+1)/2), nil
	case *p.Regex == `\A +| +\z` && c.Content == "":
		return func(s string) string { return strings.Trim(s, " ") }, 1, nil
	case *p.Regex == `\A▁`:
		return func(s string) string {
			if rest, ok := strings.CutPrefix(s, "▁"); ok {
				return c.Content + rest
			}
			return s
		}, max(1, (len(c.Content)+2)/3), nil
	}
	return nil, 0, &UnsupportedError{"normalizer.pattern", string(c.Pattern)}
}

// replaceRuns replaces each run of two or more spaces.
func replaceRuns(s, by string) string {
	i := strings.Index(s, "  ")
	if i < 0 {
		return s
	}
	var out strings.Builder
	for ; i >= 0; i = strings.Index(s, "  ") {
		out.WriteString(s[:i])
		out.WriteString(by)
		s = strings.TrimLeft(s[i:], " ")
	}
	out.WriteString(s)
	return out.String()
}

const (
	// maxGrowth bounds normalized text, in bytes per byte of text, so that a short
	// prompt cannot become millions of tokens. SentencePiece's space takes 12.
	maxGrowth = 256
	// maxNormalizers bounds the passes over a text.
	maxNormalizers = 64
	// nfcGrowth is that of UTF-8 text by NFC.
	nfcGrowth = 3
)

// addNormalizer appends f, which returns at most growth bytes for each byte. It
// refuses pipelines that exceed maxGrowth or maxNormalizers.
func (t *Tokenizer) addNormalizer(kind string, growth int, f func(string) string) error {
	if len(t.normalizers) == maxNormalizers {
		return invalid("normalizer: more than %d parts", maxNormalizers)
	}
	if growth > maxGrowth/t.growth {
		return invalid("normalizer: with its %s number %d it can make a text more than %d times as long", kind, len(t.normalizers)+1, maxGrowth)
	}
	t.growth *= growth
	t.normalizers = append(t.normalizers, f)
	return nil
}

// loadPreTokenizer reads the pipeline of pre-tokenizers, which must end in
// ByteLevel: only then are the vocabulary's characters bytes.
func (t *Tokenizer) loadPreTokenizer(raw json.RawMessage) error {
	if isNull(raw) {
		return &UnsupportedError{"pre_tokenizer", "null"}
	}
	var flat []component
	if err := flatten(raw, &flat); err != nil {
		return err
	}
	for i, c := range flat {
		last := i == len(flat)-1
		if (c.Type == "ByteLevel") != last {
			return &UnsupportedError{"pre_tokenizer (ByteLevel must come last, once)", c.Type}
		}
		s, err := c.stage()
		if err != nil {
			return err
		}
		if s.scan != nil || s.prefixSpace {
			t.stages = append(t.stages, s)
		}
	}
	if len(flat) == 0 {
		return &UnsupportedError{"pre_tokenizer", "empty Sequence"}
	}
	return nil
}

func flatten(raw json.RawMessage, into *[]component) error {
	var c component
	if err := decodePart(raw, "pre_tokenizer", &c); err != nil {
		return err
	}
	if c.Type != "Sequence" {
		*into = append(*into, c)
		return nil
	}
	for _, part := range c.PreTokenizers {
		if err := flatten(part, into); err != nil {
			return err
		}
	}
	return nil
}

func (c *component) stage() (stage, error) {
	switch c.Type {
	case "ByteLevel":
		s := stage{prefixSpace: c.AddPrefixSpace == nil || *c.AddPrefixSpace}
		if c.UseRegex == nil || *c.UseRegex {
			s.scan = scanGPT2
		}
		return s, nil
	case "Digits":
		if c.IndividualDigits {
			return stage{scan: scanEachDigit}, nil
		}
		return stage{scan: scanDigits}, nil
	case "Split":
		return c.splitStage()
	}
	return stage{}, &UnsupportedError{"pre_tokenizer", c.Type}
}

// literal returns the text that a pattern looks for, where it is one.
func (c *component) literal(part string) (string, error) {
	var p struct{ String *string }
	if err := decodePart(c.Pattern, part, &p); err != nil {
		return "", err
	}
	if p.String == nil || *p.String == "" {
		return "", &UnsupportedError{part, string(c.Pattern)}
	}
	return *p.String, nil
}

func (c *component) splitStage() (stage, error) {
	var p struct{ Regex, String *string }
	if err := decodePart(c.Pattern, "pre_tokenizer.pattern", &p); err != nil {
		return stage{}, err
	}
	if p.Regex == nil {
		return stage{}, &UnsupportedError{"pre_tokenizer.pattern", string(c.Pattern)}
	}
	scan, whole, ok := findPattern(*p.Regex)
	if !ok {
		return stage{}, &UnsupportedError{"pre_tokenizer.pattern", *p.Regex}
	}
	// Where a pattern matches every character, what is between matches, and with it these two
	// settings, makes no difference.
	matchesKept := c.Behavior == "Isolated" && !c.Invert || whole && c.Behavior == "Removed" && c.Invert
	if !matchesKept {
		return stage{}, &UnsupportedError{"pre_tokenizer.behavior", c.Behavior}
	}
	return stage{scan: scan}, nil
}

// loadPostProcessor collects the tokens that go before and after the text.
func (t *Tokenizer) loadPostProcessor(raw json.RawMessage) error {
	if isNull(raw) {
		return nil
	}
	var c component
	if err := decodePart(raw, "post_processor", &c); err != nil {
		return err
	}
	switch c.Type {
	case "ByteLevel": // moves offsets, never ids
		return nil
	case "Sequence":
		for _, part := range c.Processors {
			if err := t.loadPostProcessor(part); err != nil {
				return err
			}
		}
		return nil
	case "TemplateProcessing":
		return t.loadTemplate(&c)
	}
	return &UnsupportedError{"post_processor", c.Type}
}

func (t *Tokenizer) loadTemplate(c *component) error {
	var prefix, suffix []int32
	texts := 0
	for _, piece := range c.Single {
		switch {
		case piece.Sequence != nil && piece.Sequence.ID == "A":
			texts++
		case piece.SpecialToken != nil:
			token, ok := c.SpecialTokens[piece.SpecialToken.ID]
			if !ok {
				return invalid("post_processor names %q, which its special_tokens lack", piece.SpecialToken.ID)
			}
			for _, id := range token.IDs {
				if id < 0 || id >= maxTokenID {
					return invalid("post_processor token %q has id %d", piece.SpecialToken.ID, id)
				}
			}
			if texts == 0 {
				prefix = append(prefix, token.IDs...)
			} else {
				suffix = append(suffix, token.IDs...)
			}
		default:
			return &UnsupportedError{"post_processor.single", "a piece that is neither a special token nor sequence A"}
		}
	}
	if texts != 1 {
		return &UnsupportedError{"post_processor.single", "sequence A is not in it exactly once"}
	}
	t.prefix = append(prefix, t.prefix...)
	t.suffix = append(t.suffix, suffix...)
	return nil
}

// checkDecoder accepts the decoders that join the tokens' bytes.
func checkDecoder(raw json.RawMessage) error {
	if isNull(raw) {
		return &UnsupportedError{"decoder", "null"}
	}
	var c component
	if err := decodePart(raw, "decoder", &c); err != nil {
		return err
	}
	if c.Type == "Sequence" && len(c.Decoders) == 1 {
		return checkDecoder(c.Decoders[0])
	}
	if c.Type != "ByteLevel" {
		return &UnsupportedError{"decoder", c.Type}
	}
	return nil
}
