// Command tandem serves large language models on a fleet: a gateway that speaks
// the OpenAI API, prefill nodes, decode nodes, or all of them in one process.
package main

import (
	"os"

	"github.com/tandem-serving/tandem/internal/roles"
)

// version is the release, which the Makefile may set.
var version = "0.1.0"

func main() {
	os.Exit(roles.Main(version, os.Args[1:], os.Environ(), os.Stdout, os.Stderr))
}
