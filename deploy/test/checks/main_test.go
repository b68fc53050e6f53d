package main

import (
	"strings"
	"testing"
)

// A check fails if one of its tests failed or did not run, and is skipped with the reason.
func TestPrint(t *testing.T) {
	results := map[string]result{}
	err := readStep(strings.NewReader(`{"Action":"run","Test":"TestA"}
{"Action":"output","Test":"TestA","Output":"=== RUN   TestA\n"}
{"Action":"pass","Test":"TestA"}
{"Action":"output","Test":"TestB","Output":"    b_test.go:7: needs a container\n"}
{"Action":"output","Test":"TestB","Output":"--- SKIP: TestB (0.00s)\n"}
{"Action":"skip","Test":"TestB"}
{"Action":"fail","Test":"TestC/part"}
`), "step", results)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	checks := []check{
		{1, "passes", []string{"step TestA"}, ""},
		{2, "skips", []string{"step TestA", "step TestB"}, ""},
		{3, "fails", []string{"step TestC/part", "step TestB"}, ""},
		{4, "is absent", []string{"step TestA", "other TestA"}, ""},
		{5, "has no test", nil, "needs a GPU"},
	}
	if print(&b, checks, results) || !print(&strings.Builder{}, checks[:2], results) {
		t.Error("the result is not that of the checks")
	}
	if want := ` 1  passed   passes
 2  skipped  skips: b_test.go:7: needs a container
 3  FAILED   fails: step TestC/part
 4  FAILED   is absent: other TestA did not run
 5  skipped  has no test: needs a GPU
`; b.String() != want {
		t.Errorf("%s\nwant\n%s", &b, want)
	}
	for i, c := range all {
		if c.number != i+1 || (len(c.tests) == 0) == (c.none == "") {
			t.Errorf("check %d: %+v", i+1, c)
		}
	}
}
