// Command tandem serves large language models on a fleet: a gateway that speaks
// the OpenAI API, prefill nodes, decode nodes, or all of them in one process.
package main

import (
	"os"

	"github.com/tandem-serving/tandem/internal/roles"
)

// version is the release. The Makefile sets it to the nearest tag.
var version = "0.2.0-dev"

func main() {
	os.Exit(roles.Main(version, os.Args[1:], os.Environ(), os.Stdout, os.Stderr))
}
