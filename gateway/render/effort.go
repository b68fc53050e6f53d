package render

import (
	"slices"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/render/jinja"
)

// efforts are the values of reasoning_effort, from the least to the most.
var efforts = openai.ReasoningEfforts

// thinkingSwitches are the variables by which templates turn reasoning on or off.
var thinkingSwitches = []string{"enable_thinking", "thinking"}

// noThink is the name of efforts[0] in some templates.
const noThink = "no_think"

// commonEfforts are the values of templates that compare the variable with fewer than two.
var commonEfforts = []string{"low", "medium", "high"}

// knownEfforts returns the values of reasoning_effort that a template distinguishes.
func knownEfforts(t *jinja.Template) []string {
	known := slices.DeleteFunc(t.Compared("reasoning_effort"), func(s string) bool { return s != noThink && !slices.Contains(efforts, s) })
	if len(known) < 2 {
		known = append(known, commonEfforts...)
	}
	return known
}

// effort returns the value of reasoning_effort for the template: the wanted one, or the nearest one
// that the template knows, of two the lower. Other values than none do not become none.
func (t *TextModel) effort(want string) string {
	if slices.Contains(t.efforts, want) {
		return want
	}
	if want == efforts[0] && slices.Contains(t.efforts, noThink) {
		return noThink
	}
	best, least := want, len(efforts)
	for at, have := range efforts {
		if at == 0 || !slices.Contains(t.efforts, have) {
			continue
		}
		distance := at - slices.Index(efforts, want)
		if distance = max(distance, -distance); distance < least {
			best, least = have, distance
		}
	}
	return best
}
