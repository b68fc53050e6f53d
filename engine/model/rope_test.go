package model

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
)

// longCheckpoints are folders that make_goldens.py made, one for each kind of rotation
// and architecture that has it: a prompt of 6,000 tokens each.
var longCheckpoints = []string{"long-llama3", "long-default", "long-gpt-oss", "long-deepseek", "long-gemma4", "long-linear", "long-dynamic", "long-longrope", "long-glm"}

// Logits far from the start of a prompt are those of frequencies computed in float32,
// as transformers does. With frequencies that are rounded once, from float64, they
// are not.
func TestLongGoldens(t *testing.T) {
	tolerance := 2e-5
	limits := backend.Limits{Tokens: 500, Outputs: 4, Seqs: 1, Blocks: 376}
	names, fast := longCheckpoints, len(cpu.Variants()) > 1
	if !fast { // without C kernels each takes 8 s, and sums of 6,000 terms have one chain
		names, tolerance = names[:1], 1e-4
	}
	if testing.Short() {
		names = names[:1]
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			g := readGoldensOf(t, name).Cases[0]
			if len(g.Prompt) != 6000 || g.Positions[len(g.Positions)-1] != 5999 {
				t.Fatalf("a prompt of %d tokens with logits of %v", len(g.Prompt), g.Positions)
			}
			worst := func(exact bool) float64 {
				m := loadBare(t, openCheckpoint(t, name), cpu.Options{Threads: 1, Limits: limits, Kernels: cpu.Auto, Mapped: true})
				if exact {
					exactRotation(t, m)
				}
				off, _ := newSequenceWithin(m, limits, g.Prompt, 1).compare(t, &g, func() int { return limits.Tokens })
				return off
			}
			tolerance := tolerance
			if name == "long-longrope" && fast { // few of whose frequencies round otherwise
				tolerance /= 2
			}
			off := worst(false)
			if !(off <= tolerance) {
				t.Errorf("a logit is off by %g, at most %g is allowed", off, tolerance)
			}
			if !fast {
				return
			}
			rounded := worst(true)
			t.Logf("worst error of a logit %.2g; with frequencies rounded once %.2g", off, rounded)
			if !(rounded > tolerance) {
				t.Errorf("with frequencies rounded once the worst error is %g: the golden does not see how they are rounded", rounded)
			}
		})
	}
}

// exactRotation rounds the frequencies of m's full attention once.
func exactRotation(t *testing.T, m *Model) {
	t.Helper()
	c := &m.config
	switch net := m.net.(type) {
	case *decoder:
		exactFrequencies(&c.Rope, c.rotary(), &net.rope)
	case *gemma4:
		exactFrequencies(&c.Gemma4.FullRope, c.Gemma4.FullHeadDim, &net.kinds[kindOf(true)].rope)
	default:
		t.Fatalf("no rotation of %T", net)
	}
}

// The frequencies of each kind of rotation are those of transformers (make_goldens.py). A
// few are off by one unit in the last place, because torch's power is not rounded correctly.
func TestFrequencies(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("testdata", "frequencies.json"))
	if err != nil {
		t.Fatal(err)
	}
	var rows []struct {
		Rope struct {
			Type     string  `json:"rope_type"`
			Theta    float64 `json:"rope_theta"`
			Factor   float64 `json:"factor"`
			Low      float64 `json:"low_freq_factor"`
			High     float64 `json:"high_freq_factor"`
			Fast     float64 `json:"beta_fast"`
			Slow     float64 `json:"beta_slow"`
			Truncate bool    `json:"truncate"`
			Original float64 `json:"original_max_position_embeddings"`
			Partial  float64 `json:"partial_rotary_factor"`
		} `json:"rope"`
		Dim  int      `json:"dim"`
		Bits []uint32 `json:"bits"`
	}
	if err := json.Unmarshal(text, &rows); err != nil {
		t.Fatal(err)
	}
	kinds, all, differ, rounded := map[string]bool{}, 0, 0, 0
	for _, row := range rows {
		r := row.Rope
		c := RopeConfig{Theta: r.Theta, Type: r.Type, Factor: r.Factor, LowFreq: r.Low, HighFreq: r.High, Original: r.Original,
			BetaFast: r.Fast, BetaSlow: r.Slow, Whole: r.Truncate, Partial: r.Partial}
		if err := c.check(); err != nil {
			t.Fatal(err)
		}
		got, exact := c.table(row.Dim), c.table(row.Dim)
		exactFrequencies(&c, row.Dim, &exact)
		if len(got.InvFreq) != len(row.Bits) {
			t.Fatalf("%+v: %d frequencies, want %d", c, len(got.InvFreq), len(row.Bits))
		}
		for i, f := range got.InvFreq {
			all++
			if want := math.Float32frombits(row.Bits[i]); f != want {
				differ++
				if f != math.Nextafter32(want, f) {
					t.Errorf("%+v: frequency %d of heads of %d is %v, want %v", c, i, row.Dim, f, want)
				}
			}
			if f != exact.InvFreq[i] {
				rounded++
			}
		}
		kinds[c.Type] = true
	}
	t.Logf("of %d frequencies %d differ from torch's, %d from those rounded once", all, differ, rounded)
	if len(kinds) != 4 || differ > all/50 || rounded < all/10 {
		t.Errorf("kinds %v; of %d frequencies %d differ from torch's, %d from those rounded once", kinds, all, differ, rounded)
	}
}

// exactFrequencies writes the frequencies computed in float64 and rounded once.
func exactFrequencies(c *RopeConfig, dim int, r *backend.Rope) {
	for i := range r.InvFreq {
		f := math.Pow(c.Theta, -2*float64(i)/float64(dim))
		switch c.Type {
		case "llama3":
			wavelength := 2 * math.Pi / f
			if mix := (c.Original/wavelength - c.LowFreq) / (c.HighFreq - c.LowFreq); mix < 1 {
				mix = max(mix, 0)
				f = (1-mix)*f/c.Factor + mix*f
			}
		case "linear":
			f /= c.Factor
		case "dynamic":
			theta := c.Theta * math.Pow(c.Factor*c.Factor-(c.Factor-1), float64(dim)/float64(dim-2))
			f = math.Pow(theta, -2*float64(i)/float64(dim))
		case "longrope":
			f /= c.Long[i]
		case "proportional":
			if r.InvFreq[i] == 0 {
				f = 0
			}
			f /= max(c.Factor, 1)
		case "yarn":
			ramp := float64(c.ramp(i, dim))
			f = f/c.Factor*ramp + f*(1-ramp)
		}
		r.InvFreq[i] = float32(f)
	}
}

// The frequencies are within rounding of the exact ones, for any size of a head.
func TestFrequenciesAreClose(t *testing.T) {
	for _, c := range []RopeConfig{
		{Theta: 10000, Type: "default"},
		{Theta: 1000000, Type: "default"},
		{Theta: 500000, Type: "llama3", Factor: 8, LowFreq: 1, HighFreq: 4, Original: 8192},
		{Theta: 1000000, Type: "proportional", Partial: 0.25},
		{Theta: 150000, Type: "yarn", Factor: 32, BetaFast: 32, BetaSlow: 1, Original: 4096},
		{Theta: 10000, Type: "yarn", Factor: 40, BetaFast: 32, BetaSlow: 1, Original: 4096, Whole: true},
	} {
		for _, dim := range []int{8, 12, 24, 64, 80, 128, 512} {
			got, want := c.table(dim), c.table(dim)
			exactFrequencies(&c, dim, &want)
			for i, f := range got.InvFreq {
				if off := math.Abs(float64(f) - float64(want.InvFreq[i])); !(off <= 2e-6*float64(want.InvFreq[i])) {
					t.Errorf("%+v: frequency %d of heads of %d is %g, exact is %g", c, i, dim, f, want.InvFreq[i])
				}
			}
		}
	}
}
