//go:build !race

// Two thousand questions find no race that the fifty of builtin_test.go do not.

package e2e

import (
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
)

// refused says whether the model says that it does not know or cannot do it.
func refused(answer string) bool {
	return strings.HasPrefix(answer, "I do not know that.") || strings.HasPrefix(answer, "I cannot do that.")
}

// score counts the answers to questions of one list and kind.
type score struct{ asked, right, refused int }

func (s *score) add(q *question, answer string) {
	s.asked++
	if refused(answer) {
		s.refused++
	}
	if q.Answer != "" && answer == q.Answer {
		s.right++
	}
}

func (s score) plus(o score) score {
	return score{s.asked + o.asked, s.right + o.right, s.refused + o.refused}
}

func (s score) share(n int) float64 { return float64(n) / float64(max(1, s.asked)) }

// figures asks lists of questions and logs a line for each kind in each of them.
func (a *asker) figures(t *testing.T, files ...string) (known, unknown score) {
	t.Helper()
	for _, file := range files {
		qs, by := questions(t, file), map[string]*score{}
		for i, got := range a.askAll(t, qs) {
			q := &qs[i]
			if by[q.Kind] == nil {
				by[q.Kind] = new(score)
			}
			by[q.Kind].add(q, got.text)
			if q.Kind == "refusal" {
				unknown.add(q, got.text)
			} else {
				known.add(q, got.text)
			}
		}
		for _, kind := range slices.Sorted(maps.Keys(by)) {
			t.Logf("%s %s: asked %d, right %d, refused %d", file, kind, by[kind].asked, by[kind].right, by[kind].refused)
		}
	}
	return known, unknown
}

// The figures of the model card, through the whole engine: trained phrasings,
// phrasings and unknown questions that training never saw, and stories. The
// lists are fixed; corpus.py refuses to train on the held-out ones. In int8 each
// figure is within 2 points of what it is as the weights are stored, or one answer.
func TestBuiltinModelFigures(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: asks 3,400 questions; TestBuiltinModelAnswers asks some")
	}
	stored, int8 := figuresIn(t, "none"), figuresIn(t, "int8")
	for i, l := range stored {
		if l.share < l.least {
			t.Errorf("%s: %.1f %%, want at least %.0f %%", l.what, 100*l.share, 100*l.least)
		}
		if off := math.Abs(l.share - int8[i].share); off > 0.02 && off > 1.5/float64(l.asked) {
			t.Errorf("%s: %.1f %% in int8, %.1f %% as the weights are stored", l.what, 100*int8[i].share, 100*l.share)
		}
	}
}

func figuresIn(t *testing.T, quantization string) []line {
	a := newAsker(t, quantization)
	defer a.f.close()
	held, unknown := a.figures(t, "train/heldout.jsonl")
	if held.asked < 200 || unknown.asked < 40 {
		t.Errorf("the list is short: %d held out, %d unknown", held.asked, unknown.asked)
	}
	lines := a.allLines(t, held, unknown)
	for _, l := range lines {
		t.Logf("%s: %s: %.1f %%", quantization, l.what, 100*l.share)
	}
	return lines
}

// line is a figure and what it must reach.
type line struct {
	what         string
	share, least float64
	asked        int
}

// allLines asks everything but the first held-out list, whose scores it is given.
func (a *asker) allLines(t *testing.T, held, unknown score) []line {
	t.Helper()
	trained, _ := a.figures(t, "train/trained.jsonl")
	held2, unknown2 := a.figures(t, "train/heldout2.jsonl")
	held, unknown = held.plus(held2), unknown.plus(unknown2)
	tales := score{}
	qs := questions(t, "train/stories.jsonl")
	for i, got := range a.askAll(t, qs) {
		tales.asked++
		if wrong := wrongStory(&qs[i], got); wrong != "" {
			t.Logf("the story %q %s", qs[i].Prompt, wrong)
		} else {
			tales.right++
		}
	}
	if trained.asked < 800 || held.asked < 600 || unknown.asked < 120 || tales.asked < 40 {
		t.Errorf("the lists are short: %d trained, %d held out, %d unknown, %d stories", trained.asked, held.asked, unknown.asked, tales.asked)
	}
	return []line{
		{"trained phrasings answered exactly", trained.share(trained.right), 0.90, trained.asked},
		{"held-out phrasings answered exactly", held.share(held.right), 0.75, held.asked},
		{"unknown questions refused", unknown.share(unknown.refused), 0.80, unknown.asked},
		{"trained phrasings not refused", 1 - trained.share(trained.refused), 0.95, trained.asked},
		{"held-out phrasings not refused", 1 - held.share(held.refused), 0.95, held.asked},
		{"stories that keep their hero, are long enough and do not go in circles", tales.share(tales.right), 0.95, tales.asked},
	}
}
