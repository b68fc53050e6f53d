// Package docs has the pages that the program itself reads.
package docs

import _ "embed"

// LogLines is the page that explains Tandem's own log lines; `tandem explain-log` reads its tables.
//
//go:embed logs.md
var LogLines string
