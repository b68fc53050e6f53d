package cli

import (
	"runtime/debug"
	"strings"
	"testing"
)

func TestBuildsAreToldApart(t *testing.T) {
	digest := func() string { return "+x01234567" }
	setting := func(more ...string) (s []debug.BuildSetting) {
		for i := 0; i < len(more); i += 2 {
			s = append(s, debug.BuildSetting{Key: more[i], Value: more[i+1]})
		}
		return s
	}
	for want, info := range map[string]*debug.BuildInfo{
		"1.2.3+g4a929253c1d2":                 {Settings: setting("vcs", "git", "vcs.revision", "4a929253c1d2aabbccdd", "vcs.modified", "false")},
		"1.2.3+g4a929253c1d2.dirty":           {Settings: setting("vcs.revision", "4a929253c1d2aabbccdd", "vcs.modified", "true"), Main: debug.Module{Version: "v0.1.1-0.2026-4a92"}},
		"0.1.1-0.20261123020000-4a929253c1d2": {Main: debug.Module{Version: "v0.1.1-0.20261123020000-4a929253c1d2"}},
		"1.2.3+x01234567":                     {Main: debug.Module{Version: "(devel)"}},
	} {
		if got := buildOf("1.2.3", info, digest); got != want {
			t.Errorf("%+v: %s, want %s", info, got, want)
		}
	}
	if d := fileDigest(); !strings.HasPrefix(d, "+x") || len(d) != 10 {
		t.Errorf("digest of this file: %q", d)
	}
}
