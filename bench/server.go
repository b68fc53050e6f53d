package bench

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench/dataset"
	"github.com/tandem-serving/tandem/engine/builtin"
	"github.com/tandem-serving/tandem/engine/tokenizer"
)

// Bounds of requests before the run.
const (
	askTimeout = 10 * time.Second
	maxAnswer  = 16 << 20
)

// server is the client of a server's model and tokenizer endpoints.
type server struct {
	base   string
	header http.Header
	client *http.Client
}

func newServer(base string, h http.Header, insecure bool) *server {
	return &server{base: base, header: h, client: &http.Client{Timeout: askTimeout, Transport: transport(insecure)}}
}

func transport(insecure bool) *http.Transport {
	return &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: insecure, MinVersion: tls.VersionTLS12}} //nolint:gosec // the user asks for it
}

func (s *server) close() { s.client.CloseIdleConnections() }

// ask sends a body, or none, and decodes the answer into v.
func (s *server) ask(ctx context.Context, method, path string, body, v any) error {
	var in io.Reader
	if body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			return err
		}
		in = bytes.NewReader(data)
	}
	q, err := http.NewRequestWithContext(ctx, method, s.base+path, in)
	if err != nil {
		return err
	}
	q.Header = s.header.Clone()
	q.Header.Set("Content-Type", "application/json")
	a, err := s.client.Do(q)
	if err != nil {
		return err
	}
	defer a.Body.Close()
	data, err := io.ReadAll(io.LimitReader(a.Body, maxAnswer))
	if err != nil {
		return err
	}
	if a.StatusCode != http.StatusOK {
		return fmt.Errorf("%s %s: %s: %.200s", method, s.base+path, a.Status, data)
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("%w: %w", errNoJSON, err)
	}
	return nil
}

// errNoJSON means that an answer is not JSON. Some servers answer with a status only.
var errNoJSON = errors.New("the answer is not JSON")

// firstModel returns the first model that the server lists.
func (s *server) firstModel(ctx context.Context) (string, error) {
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if err := s.ask(ctx, http.MethodGet, "/v1/models", nil, &list); err != nil {
		return "", fmt.Errorf("%s does not list its models: %w; --base-url or --port names another server, --model a model", s.base, err)
	}
	if len(list.Data) == 0 {
		return "", fmt.Errorf("%w: %s lists no model: give --model", ErrOption, s.base)
	}
	return list.Data[0].ID, nil
}

// profile starts or stops the server's profiler, if requested.
func (r *run) profile(ctx context.Context, what string) error {
	if !r.Profile {
		return nil
	}
	header, err := r.header()
	if err != nil {
		return err
	}
	s := newServer(r.BaseURL, header, r.Insecure)
	defer s.close()
	var answer json.RawMessage
	if err := s.ask(ctx, http.MethodPost, "/"+what+"_profile", nil, &answer); err != nil && !errors.Is(err, errNoJSON) {
		return fmt.Errorf("%w: --profile: the server has to be started with a profiler: %w", ErrOption, err)
	}
	return nil
}

// words are the material of prompts if there is no tokenizer. They are common, so that
// most are one token in most vocabularies.
var words = strings.Fields(`the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not
what all were we when your can said there use an each which she do how their if will up other about out many then them these so some her would make
like him into time has look two more write go see number no way could people my than first water been call who oil its now find long down day did get
come made may part over new sound take only little work know place year live me back give most very after thing our just name good sentence man think
say great where help through much before line right too mean old any same tell boy follow came want show also around form three small set put end does
another well large must big even such because turn here why ask went men read need land different home us move try kind hand picture again change off
play spell air away animal house point page letter mother answer found study still learn should world`)

func word(r *rand.Rand) string { return words[r.IntN(len(words))] }

// vocabulary returns the material of prompts: the ids of a local tokenizer, else the ids
// that the server's /tokenize returns for common words.
func (r *run) vocabulary(ctx context.Context, s *server) (dataset.Vocabulary, error) {
	v := dataset.Vocabulary{Word: word}
	if !r.SkipTokenizer {
		data, from, err := r.findTokenizer()
		if err != nil {
			return v, err
		}
		if data != nil {
			t, err := tokenizer.Load(data)
			if err != nil {
				return v, fmt.Errorf("%w: --tokenizer %s: %w", ErrOption, from, err)
			}
			r.tokenizer = from
			return vocabularyOf(t), nil
		}
	}
	r.tokenizer = r.Tokenizer
	if r.tokenizer == "" {
		r.tokenizer = r.model
	}
	if r.Data.AsText || !slices.Contains([]string{"random", "prefix_repetition", "timed_trace"}, r.Data.Name) {
		return v, nil
	}
	var answer struct {
		Tokens []int32 `json:"tokens"`
	}
	if err := s.ask(ctx, http.MethodPost, "/tokenize", map[string]any{"model": r.model, "prompt": strings.Join(words, " "), "add_special_tokens": false}, &answer); err != nil {
		return v, fmt.Errorf("%w: prompts of token ids need a vocabulary: give --tokenizer, or a server with /tokenize: %w", ErrOption, err)
	}
	slices.Sort(answer.Tokens)
	v.IDs = slices.Compact(answer.Tokens)
	return v, nil
}

// findTokenizer reads the tokenizer's file. It returns nil data if there is none.
func (r *run) findTokenizer() (data []byte, from string, err error) {
	name := r.Tokenizer
	if name == "" {
		name = r.Model
	}
	if name == "" {
		name = r.model
	}
	if name == "builtin" || name == builtin.Name {
		data, err = fs.ReadFile(builtin.FS(), "tokenizer.json")
		return data, builtin.Name, err
	}
	file := name
	if info, err := os.Stat(name); err == nil && info.IsDir() {
		file = filepath.Join(name, "tokenizer.json")
	}
	data, err = os.ReadFile(file)
	if err == nil {
		return data, name, nil
	}
	if r.Tokenizer == "" && errors.Is(err, fs.ErrNotExist) {
		return nil, "", nil
	}
	return nil, "", fmt.Errorf("%w: --tokenizer: %w", ErrOption, err)
}
